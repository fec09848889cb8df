// All kernels for one instruction set, as C functions named <kernel>_<ISA>. Compiled once per set with its flags and
// -DISA=<name>. Everything lives in a namespace of the set, and no header of the C++ library is included: the linker
// would take one set's copy of an inline function for all.
#include <linux/futex.h>
#include <omp.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define KERNEL(name) extern "C" void JOIN(name, ISA)

namespace JOIN(kernels, ISA) {

#include "copy.h"
#include "decoder.h"
#include "draw.h"

// A whole step: what a worker runs.
KERNEL(decode)(const Model* model, const Step* step, int64_t threads) {
  with_team(threads, [&](Team& team, int64_t thread) { decode(team, thread, *model, *step); });
}

// The tokens of its rows that are not simply the likeliest.
KERNEL(draw)(const Draw* draws, int64_t rows, int64_t columns, double* scratch, int64_t* tokens, int64_t threads) {
  with_team(threads, [&](Team& team, int64_t thread) { draw(team, thread, draws, rows, columns, scratch, tokens); });
}

// Its parts one by one, to be tested and measured. scratch: [threads][scratch_size(rows)]; rounded: as of RoundedRows, or null.
KERNEL(linear)(const float* x, int64_t x_stride, int64_t rows, const Linear* w, float* out, int64_t out_stride,
               int64_t add, float* scratch, void* rounded, int64_t threads) {
  with_team(threads, [&](Team& team, int64_t thread) {
    const LinearScratch own{scratch + thread * scratch_size(rows), rounded};
    if (add)
      linear<ADD>(team, x, x_stride, rows, *w, out, out_stride, own);
    else
      linear<STORE>(team, x, x_stride, rows, *w, out, out_stride, own);
  });
}

KERNEL(swiglu)(const float* x, int64_t x_stride, int64_t rows, const Linear* gate, const Linear* up, float* out,
               int64_t out_stride, float* scratch, void* rounded, int64_t threads) {
  with_team(threads, [&](Team& team, int64_t thread) {
    swiglu(team, x, x_stride, rows, *gate, *up, out, out_stride, {scratch + thread * scratch_size(rows), rounded});
  });
}

KERNEL(rms_norm)(const float* x, const float* weight, float* out, int64_t rows, int64_t size, float eps,
                 int64_t threads) {
  with_team(threads, [&](Team& team, int64_t) { rms_norm(team, x, weight, out, rows, size, eps); });
}

KERNEL(rope_and_write)(float* qkv, const float* q_norm, const float* k_norm, float eps, const float* cos,
                       const float* sin, const int64_t* positions, const int64_t* slots, float* keys, float* values,
                       int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t threads) {
  with_team(threads, [&](Team& team, int64_t) {
    rope_and_write(team, qkv, q_norm, k_norm, eps, cos, sin, positions, slots, keys, values, rows,
                   {heads, kv_heads, head_dim});
  });
}

KERNEL(attend)(const float* q, int64_t q_stride, const float* keys, const float* values, float* out,
               const AttentionPlan* plan, int64_t page_size, int64_t heads, int64_t kv_heads, int64_t head_dim,
               int64_t window, int64_t threads) {
  const Shape shape{{heads, kv_heads, head_dim}, page_size, window};
  with_team(threads, [&](Team& team, int64_t) {
    attend(team, q, q_stride, keys, values, out, *plan, shape, 1.0f / __builtin_sqrtf(head_dim));
  });
}

KERNEL(largest)(const float* values, int64_t rows, int64_t columns, Largest* parts, Largest* found, int64_t threads) {
  with_team(threads, [&](Team& team, int64_t) { largest(team, values, rows, columns, parts, found); });
}

// KV out of another pool, in the calling thread: runs as of copy_runs.
KERNEL(copy_runs)(char* to, const char* from, const int64_t* runs, int64_t num_runs) {
  copy_runs(to, from, runs, num_runs);
}

}  // namespace
