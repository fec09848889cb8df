// The threads of one parallel region, which go through many short phases together: a whole step of a model is one
// region, so threads are woken once a step, not once an operation.
//
// A thread that waits for the others spins for some tens of microseconds, which is longer than they are apart while
// each has a core. Then it gives its core to whoever wants it, again and again: another process, or the very thread it
// waits for, if that lost its own. Only then it sleeps. Threads that slept at once would take turns on one core beside
// an idle one, since the system moves only threads that want to run.
#pragma once

#include "vec.h"

constexpr int SPINS = 200;
constexpr int YIELDS = 20000;

static inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Team {
 public:
  // Called by each thread first. The runtime may have started fewer than were asked for.
  void join() { __atomic_store_n(&threads_, int64_t{omp_get_num_threads()}, __ATOMIC_RELAXED); }

  // Body(begin, end) over [0, total), each piece by whichever thread is free: large pieces first, so that memory is
  // read in long runs, then small ones, so that all end together. Every thread of the team calls it; returns when
  // all is done.
  template <typename Body>
  void share(int64_t total, Body body) {
    for (;;) {
      int64_t begin = __atomic_load_n(&next_, __ATOMIC_RELAXED), end;
      do {
        if (begin >= total) return wait();
        const int64_t piece = (total - begin) / (2 * threads_);
        end = begin + (piece > 1 ? piece : 1);
      } while (!__atomic_compare_exchange_n(&next_, &begin, end, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
      body(begin, end);
    }
  }

  // Until every thread is here. What each wrote before is seen by all after.
  void wait() {
    const uint32_t phase = __atomic_load_n(&phase_, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&arrived_, 1, __ATOMIC_ACQ_REL) == threads_) {
      arrived_ = 0;
      next_ = 0;
      __atomic_store_n(&phase_, phase + 1, __ATOMIC_SEQ_CST);
      if (__atomic_load_n(&sleepers_, __ATOMIC_SEQ_CST)) futex(FUTEX_WAKE_PRIVATE, INT32_MAX);
      return;
    }
    for (int spin = 0; spin < SPINS; ++spin) {
      if (__atomic_load_n(&phase_, __ATOMIC_ACQUIRE) != phase) return;
      relax();
    }
    for (int yield = 0; yield < YIELDS; ++yield) {
      if (__atomic_load_n(&phase_, __ATOMIC_ACQUIRE) != phase) return;
      sched_yield();
    }
    __atomic_add_fetch(&sleepers_, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&phase_, __ATOMIC_SEQ_CST) == phase) futex(FUTEX_WAIT_PRIVATE, phase);
    __atomic_sub_fetch(&sleepers_, 1, __ATOMIC_SEQ_CST);
  }

 private:
  void futex(int operation, uint32_t value) { syscall(SYS_futex, &phase_, operation, value, nullptr, nullptr, 0); }

  alignas(64) int64_t next_ = 0;  // first item nobody has taken
  alignas(64) int64_t arrived_ = 0;
  uint32_t phase_ = 0;
  uint32_t sleepers_ = 0;
  int64_t threads_ = 0;
};

// Runs body(team, thread) on up to `threads` threads, the caller's included.
template <typename Body>
static inline void with_team(int64_t threads, Body body) {
  Team team;
#pragma omp parallel num_threads(threads)
  {
    team.join();
    body(team, omp_get_thread_num());
  }
}
