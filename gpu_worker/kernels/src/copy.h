// Copies of KV between pools. What is written goes around the caches: a line that is overwritten whole need not be read
// first, and pages just pulled are read once, by the next prefill.
#pragma once

constexpr int64_t STREAMED_BYTES = 1024;  // shorter runs are not worth a line read at either end

static inline void copy_run(char* to, const char* from, int64_t size) {
#if defined(__AVX__)
  if (size >= STREAMED_BYTES) {
    const int64_t head = -reinterpret_cast<intptr_t>(to) & 63;
    memcpy(to, from, head);
    to += head, from += head, size -= head;
    for (; size >= 128; to += 128, from += 128, size -= 128) {
      const __m256i* source = reinterpret_cast<const __m256i*>(from);
      __m256i* target = reinterpret_cast<__m256i*>(to);
      const __m256i a = _mm256_loadu_si256(source), b = _mm256_loadu_si256(source + 1);
      const __m256i c = _mm256_loadu_si256(source + 2), d = _mm256_loadu_si256(source + 3);
      _mm256_stream_si256(target, a);
      _mm256_stream_si256(target + 1, b);
      _mm256_stream_si256(target + 2, c);
      _mm256_stream_si256(target + 3, d);
    }
  }
#endif
  memcpy(to, from, size);
}

// runs: [num_runs][3]: offset in `to`, offset in `from`, bytes.
static inline void copy_runs(char* to, const char* from, const int64_t* runs, int64_t num_runs) {
  for (const int64_t* run = runs; run < runs + 3 * num_runs; run += 3) copy_run(to + run[0], from + run[1], run[2]);
#if defined(__AVX__)
  _mm_sfence();  // streamed stores are ordered with nothing else
#endif
}
