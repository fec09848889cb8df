// The threads of one parallel region, which go through many short phases together: a whole step of a model is one
// region, so threads are woken once a step, not once an operation.
//
// A thread may lose its core at any time to another process of the same machine, for longer than a phase takes. The
// others then do its part of the work too (backup tasks, docs/adr/0015): they go on, phase after phase, and it follows when
// it has a core again. So nobody waits for a thread; a phase is over when all of its pieces are. Only a thread with a
// piece that cannot be done twice is waited for, and all at the region's end.
//
// Who waits spins for some microseconds. Then it gives its core to whoever wants it, again and again: another process, or
// the very thread it waits for. Only then it sleeps. Threads that slept at once would take turns on one core beside an idle
// one, since the system moves only threads that want to run.
#pragma once

#include "vec.h"

constexpr int MOST_THREADS = 64;  // that others do the work of; those after them are waited for
constexpr int64_t RESULT_FLOATS = 16384;  // of a piece that may be done twice: 64 KB, in the second cache
constexpr int64_t LEAST_PATIENCE_NS = 5000, MOST_PATIENCE_NS = 500000;
constexpr int SPINS = 200;
constexpr int YIELDS = 20000;

static inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

static inline int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

// What a thread of a team is at. The state names phase and piece, and whether anyone may still settle it.
struct alignas(64) Piece {
  static constexpr uint64_t OPEN = 1;
  uint64_t state = 0;  // phase << 32 | number of the thread's piece << 1 | OPEN
  int64_t begin = 0, end = 0;

  // Whether the caller is the one who may write the piece's results.
  bool settle(uint64_t open) {
    return __atomic_compare_exchange_n(&state, &open, open & ~OPEN, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
  }
};

// What the threads of a team share.
struct TeamState {
  alignas(64) uint64_t next = 0;  // phase << 32 | its first item nobody has taken
  alignas(64) int64_t done = 0;   // items of the phase
  uint32_t sleepers = 0;
  Piece pieces[MOST_THREADS];
};

// One thread's part in a team. Every thread calls the same methods in the same order, with the same totals.
class Team {
 public:
  // The runtime may have started fewer threads than were asked for.
  explicit Team(TeamState& state) : state_(state), threads_(omp_get_num_threads()), thread_(omp_get_thread_num()) {}

  // Body(begin, end) over [0, total), each piece by whichever thread is free: large pieces first, so that memory is
  // read in long runs, then small ones, so that all end together. Returns when all is done.
  template <typename Body>
  void share(int64_t total, Body body) {
    if (total == 0) return;
    for (int64_t begin, end; take(total, total, 1, begin, end);) {
      body(begin, end);
      add_done(end - begin, total);
    }
    for (int spin = 0; spin < SPINS; ++spin) {
      if (is_over()) return begin_next();
      relax();
    }
    wait();
  }

  // The same, of pieces of at most `most` items that may be done twice: compute(begin, end, results) only reads what others
  // write and writes only to results [RESULT_FLOATS]; commit(begin, end, results) then happens once. A late thread's
  // compute reads what the others have gone on to write, in vain. Pieces are multiples of `unit`, until there is less than
  // one for each thread.
  template <typename Compute, typename Commit>
  void share_with_backup(int64_t total, int64_t most, int64_t unit, Compute compute, Commit commit) {
    if (total == 0) return;
    alignas(64) float results[RESULT_FLOATS];
    const int64_t started_ns = now_ns();
    int64_t taken = 0;
    for (int64_t begin, end; take(total, most, unit, begin, end); taken += end - begin) {
      const uint64_t open = publish(begin, end);
      compute(begin, end, results);
      if (open && !state_.pieces[thread_].settle(open)) continue;
      commit(begin, end, results);
      add_done(end - begin, total);
    }
    // A thread that has its core needs no longer for its last piece than this one for a piece like it.
    const int64_t now = now_ns(), patience_ns = taken ? 2 * (now - started_ns) / taken : 0;
    const int64_t until_ns = now + (patience_ns < LEAST_PATIENCE_NS  ? LEAST_PATIENCE_NS
                                    : patience_ns > MOST_PATIENCE_NS ? MOST_PATIENCE_NS
                                                                     : patience_ns);
    do {
      if (is_over()) return begin_next();
      relax();
    } while (now_ns() < until_ns);
    for (int64_t i = 1; i < threads_ && !is_over(); ++i) {  // each begins with the next thread's
      const int64_t thread = (thread_ + i) % threads_;
      if (thread >= MOST_THREADS) continue;
      Piece& piece = state_.pieces[thread];
      const uint64_t open = __atomic_load_n(&piece.state, __ATOMIC_ACQUIRE);
      if (!(open & Piece::OPEN) || open >> 32 != phase_) continue;
      const int64_t begin = __atomic_load_n(&piece.begin, __ATOMIC_ACQUIRE);
      const int64_t end = __atomic_load_n(&piece.end, __ATOMIC_ACQUIRE);
      if (__atomic_load_n(&piece.state, __ATOMIC_RELAXED) != open) continue;
      compute(begin, end, results);
      if (!piece.settle(open)) continue;
      commit(begin, end, results);
      add_done(end - begin, total);
    }
    wait();
  }

 private:
  // The next piece; false when none is left, or the phase is over: this thread is late.
  bool take(int64_t total, int64_t most, int64_t unit, int64_t& begin, int64_t& end) {
    uint64_t next = __atomic_load_n(&state_.next, __ATOMIC_ACQUIRE);
    do {
      begin = int64_t{uint32_t(next)};
      if (next >> 32 != phase_ || begin >= total) return false;
      int64_t piece = (total - begin) / (2 * threads_);
      piece = piece > most ? most : piece > 1 ? piece : 1;
      if (total - begin >= unit * threads_ && unit <= most) piece = piece > unit ? piece / unit * unit : unit;
      end = begin + piece;
    } while (!__atomic_compare_exchange_n(&state_.next, &next, uint64_t{phase_} << 32 | uint64_t(end), true,
                                          __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE));
    return true;
  }

  // Lets others know of a piece that they may do as well; the state it is open in, or 0 if there is no place for it.
  uint64_t publish(int64_t begin, int64_t end) {
    if (thread_ >= MOST_THREADS) return 0;
    Piece& piece = state_.pieces[thread_];
    // RELEASE: who sees these sees that the piece before is settled, and does not take one's begin with the other's end.
    __atomic_store_n(&piece.begin, begin, __ATOMIC_RELEASE);
    __atomic_store_n(&piece.end, end, __ATOMIC_RELEASE);
    const uint64_t open = uint64_t{phase_} << 32 | uint64_t{++piece_} << 1 | Piece::OPEN;
    __atomic_store_n(&piece.state, open, __ATOMIC_RELEASE);
    return open;
  }

  void add_done(int64_t items, int64_t total) {
    if (__atomic_add_fetch(&state_.done, items, __ATOMIC_ACQ_REL) != total) return;
    __atomic_store_n(&state_.done, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&state_.next, uint64_t{phase_ + 1} << 32, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&state_.sleepers, __ATOMIC_SEQ_CST)) futex(FUTEX_WAKE_PRIVATE, INT32_MAX);
  }

  bool is_over() const { return __atomic_load_n(&state_.next, __ATOMIC_ACQUIRE) >> 32 != phase_; }
  void begin_next() { ++phase_; }

  void wait() {
    for (int yield = 0; yield < YIELDS; ++yield) {
      if (is_over()) return begin_next();
      sched_yield();
    }
    __atomic_add_fetch(&state_.sleepers, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&state_.next, __ATOMIC_SEQ_CST) >> 32 == phase_) futex(FUTEX_WAIT_PRIVATE, phase_);
    __atomic_sub_fetch(&state_.sleepers, 1, __ATOMIC_SEQ_CST);
    begin_next();
  }

  // On the phase in state_.next.
  void futex(int operation, uint32_t value) {
    static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&state_.next) + 1, operation, value, nullptr, nullptr, 0);
  }

  TeamState& state_;
  const int64_t threads_, thread_;
  uint32_t phase_ = 0;
  uint32_t piece_ = 0;
};

// Runs body(team, thread) on up to `threads` threads, the caller's included.
template <typename Body>
static inline void with_team(int64_t threads, Body body) {
  TeamState state;
#pragma omp parallel num_threads(threads)
  {
    Team team(state);
    body(team, omp_get_thread_num());
  }
}
