// Which of the compiled instruction sets this CPU runs, best first.
#include <cstdint>

extern "C" int64_t cpu_runs_avx512() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return 0;
#endif
}

extern "C" int64_t cpu_runs_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return 0;
#endif
}

// Whether the avx512 set, where it runs, may be given weights for dot products (dots.h).
extern "C" int64_t cpu_dots_bfloat16() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16") != 0;
#else
  return 0;
#endif
}

extern "C" int64_t cpu_dots_int8() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512vnni") != 0;
#else
  return 0;
#endif
}
