// Few rows meet a weight that is read once: it takes as long as reading the weight.
//
// The weight's rows come one after another, each whole, so that memory sees one stream, and are asked for well ahead.
// The lanes of sums are added when there are as many sums as lanes.
#pragma once

#include "../projection.h"
#include "beside-inl.h"
#include "sums-inl.h"

namespace {

using qkv::Projection;

constexpr int64_t ASKED_AHEAD = 4096;      // bytes of the weight
constexpr int64_t UNIT_NUMBERS = 1 << 15;  // of the weight, that a unit of work reads at least
constexpr int64_t CHAINS = 4;              // of additions, side by side in one sum
constexpr int64_t MEETING = 2;             // rows of x that meet a row of the weight in registers

template <class T>
struct ProjectionScratch {
  ProjectionScratch(const Projection& asked, Arena& arena)
      : width(padded<T>(asked.inputs)),
        x(arena.take<const T*>(asked.rows)),
        room(arena.take<T>(asked.rows * width)),
        sums(arena.take<F<T>>(asked.rows * LANES<T>)) {}

  static size_t bytes(const Projection& asked) {
    Arena measure(nullptr);
    ProjectionScratch made(asked, measure);
    return measure.used();
  }

  int64_t width;
  const T** x;   // its rows, as numbers to compute with
  T* room;       // for those that are copies
  F<T>* sums;    // (R, LANES), whose lanes are still to be added
};

template <class T>
class ProjectionPass {
 public:
  explicit ProjectionPass(const Projection& asked)
      : p_(asked),
        share_(padded<T>(blocks_of(UNIT_NUMBERS, most(1, asked.inputs)))),
        ahead_(asked.weight_stride == asked.inputs ? ASKED_AHEAD / size_of(asked.type) : 0) {}

  Status operator()(const Run& run) {
    const int64_t units = p_.rows ? blocks_of(p_.outputs, share_) : 0;
    return each_of(*this, run_for(run, p_.outputs * p_.inputs), units, ProjectionScratch<T>::bytes(p_),
                   &ProjectionPass::unit);
  }

 private:
  void unit(int64_t unit, Arena arena) {
    const ProjectionScratch<T> scratch(p_, arena);
    for (int64_t r = 0; r < p_.rows; ++r) {
      scratch.x[r] = row_in(p_.x, p_.type, r * p_.x_stride, p_.inputs, scratch.room + r * scratch.width);
    }
    const int64_t stop = least(p_.outputs, (unit + 1) * share_);
    with_stored<T>(p_.type, [&](auto stored) {
      using E = decltype(stored);
      for (int64_t n = unit * share_; n < stop; n += LANES<T>) block<E>(n, least(LANES<T>, stop - n), scratch);
    });
  }

  // Outputs n to n + count of every row.
  template <class E>
  void block(int64_t n, int64_t count, const ProjectionScratch<T>& scratch) const {
    const E* weight = static_cast<const E*>(p_.weight) + n * p_.weight_stride;
    for (int64_t lane = 0; lane < count; ++lane, weight += p_.weight_stride) {
      int64_t r = 0;
      for (; r + MEETING <= p_.rows; r += MEETING) dots<MEETING>(weight, scratch.x + r, sums_at(scratch, r, lane));
      for (; r < p_.rows; ++r) dots<1>(weight, scratch.x + r, sums_at(scratch, r, lane));
    }
    const F<T> bias = bias_of<E>(n, count);
    for (int64_t r = 0; r < p_.rows; ++r) {
      F<T>* const sums = sums_at(scratch, r, 0);
      for (int64_t lane = count; lane < LANES<T>; ++lane) sums[lane] = F<T>{};
      store_some<T>(static_cast<E*>(p_.output) + r * p_.outputs + n, sums_of<T>(sums) + bias, count);
    }
  }

  static F<T>* sums_at(const ProjectionScratch<T>& scratch, int64_t row, int64_t lane) {
    return scratch.sums + row * LANES<T> + lane;
  }

  template <class E>
  F<T> bias_of(int64_t n, int64_t count) const {
    if (!p_.bias) return F<T>{};
    return some<E>(static_cast<const E*>(p_.bias) + n, count);
  }

  // The first `count` numbers, at most a vector, and zeros.
  template <class E>
  static F<T> some(const E* from, int64_t count) {
    if (count >= LANES<T>) return load_as<T>(from);
    F<T> made{};
    for (int64_t lane = 0; lane < count; ++lane) made[lane] = number_as<T>(from[lane]);
    return made;
  }

  // Ask the memory for a step of the weight: before the loads of the step, not among them, where GCC puts it.
  template <class E>
  static inline __attribute__((always_inline)) void ask(const E* from) {
    for (int64_t at = 0; at < CHAINS * LANES<T>; at += 64 / static_cast<int64_t>(sizeof(E))) {
      __builtin_prefetch(from + at);
      asm volatile("" ::: "memory");
    }
  }

  // One row of the weight by ROWS rows of x, whose sums lie LANES apart.
  template <int ROWS, class E>
  inline __attribute__((always_inline)) void dots(const E* weight, const T* const* x, F<T>* sums) const {
    constexpr int64_t STEP = CHAINS * LANES<T>;
    F<T> chains[ROWS * CHAINS];
    clear<T>(chains);
    int64_t k = 0;
    for (; k + STEP <= p_.inputs; k += STEP) {
      ask<E>(weight + k + ahead_);
#pragma GCC unroll 4
      for (int64_t c = 0; c < CHAINS; ++c) {
        const F<T> numbers = load_as<T>(weight + k + c * LANES<T>);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) chains[r * CHAINS + c] += numbers * load(x[r] + k + c * LANES<T>);
      }
    }
    for (; k < p_.inputs; k += LANES<T>) {
      const F<T> numbers = some<E>(weight + k, p_.inputs - k);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) chains[r * CHAINS] += numbers * load(x[r] + k);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const F<T>* own = chains + r * CHAINS;
      sums[r * LANES<T>] = (own[0] + own[1]) + (own[2] + own[3]);
    }
  }

  const Projection& p_;
  int64_t share_, ahead_;
};

inline Status run_projection(const Projection& asked, const Run& run) {
  if (asked.type == Type::float64) return ProjectionPass<double>(asked)(run);
  return ProjectionPass<float>(asked)(run);
}

}  // namespace
