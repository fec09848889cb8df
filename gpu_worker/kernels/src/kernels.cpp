// All kernels for one instruction set, as C functions named <kernel>_<ISA>. Compiled once per set with its flags and
// -DISA=<name>; no header of the C++ library is included, whose inline functions would be shared between the sets.
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define KERNEL(name) JOIN(name, ISA)

#include "attention.h"
#include "linear.h"
#include "norm_rope.h"
