// Norms over rows with a weight and a gate: one pass over memory, a row at a time, forward and backward.
#pragma once

#include "beside-inl.h"

namespace {

using qkv::Activation;
using qkv::Norm;
using qkv::NormGradients;

enum class Gating { none, after, first };  // where the gate comes in

constexpr int64_t GROUP_NUMBERS = 1 << 14, LEAST_GROUP = 16;  // what a unit has, and of how many rows at least

// What one unit has of the call; all rows are padded.
template <class T>
struct NormScratch {
  NormScratch(const Norm& asked, Arena& arena)
      : width(padded<T>(asked.width)),
        weight(arena.take<T>(width * (asked.weight ? asked.weight_rows : 1))),
        x(arena.take<T>(width)),
        gate(arena.take<T>(width)),
        given(arena.take<T>(width)),
        bent(arena.take<T>(width)),
        slope(arena.take<T>(width)),
        scaled(arena.take<T>(width)) {}

  static size_t bytes(const Norm& asked) {
    Arena measure(nullptr);
    NormScratch made(asked, measure);
    return measure.used();
  }

  int64_t width;
  T* weight;            // of all its rows
  T *x, *gate, *given;  // copies of rows
  T *bent, *slope;      // act(gate) and its derivative
  T* scaled;            // what is normed, or its gradient
};

template <class T>
class NormPass {
 public:
  NormPass(const Norm& asked, const NormGradients& gradients)
      : p_(asked),
        g_(gradients),
        rows_(asked.outer * asked.inner),
        share_(asked.mean ? static_cast<T>(1) / static_cast<T>(asked.width) : 1),
        group_(group_of(asked)) {}

  Status forward(const Run& run) {
    switch (gating()) {
      case Gating::none: return units(run, &NormPass::template forward_unit<Gating::none>);
      case Gating::after: return units(run, &NormPass::template forward_unit<Gating::after>);
      default: return units(run, &NormPass::template forward_unit<Gating::first>);
    }
  }

  Status backward(const Run& run) {
    const int64_t groups = blocks_of(rows_, group_), wide = padded<T>(p_.width), columns = p_.weight_rows * wide;
    Buffer sums;
    if (g_.weight) {
      if (!sums.reserve(static_cast<size_t>(groups * columns) * sizeof(T))) return Status::out_of_memory;
      sums_ = static_cast<T*>(sums.data());
    }
    const Status status = backward_units(run);
    if (status != Status::ok || !g_.weight) return status;
    return sum_rows<T>(run, sums_, groups, columns, [this, wide](int64_t column, T sum) {
      const int64_t row = column / wide, c = column % wide;
      if (c < p_.width) static_cast<T*>(g_.weight)[row * p_.width + c] = sum;
    });
  }

 private:
  Gating gating() const {
    if (p_.activation == Activation::none) return Gating::none;
    return p_.gate_first ? Gating::first : Gating::after;
  }

  // Rows of a unit: each of the weight's as often.
  static int64_t group_of(const Norm& asked) {
    const int64_t rows = most(LEAST_GROUP, GROUP_NUMBERS / most(1, asked.width));
    return blocks_of(rows, asked.weight_rows) * asked.weight_rows;
  }

  Status units(const Run& run, void (NormPass::*method)(int64_t, Arena)) {
    return each_of(*this, run_for(run, rows_ * p_.width), blocks_of(rows_, group_), NormScratch<T>::bytes(p_), method);
  }

  Status backward_units(const Run& run) {
    switch (gating()) {
      case Gating::none: return units(run, &NormPass::template backward_unit<Gating::none>);
      case Gating::after: return units(run, &NormPass::template backward_unit<Gating::after>);
      default: return units(run, &NormPass::template backward_unit<Gating::first>);
    }
  }

  int64_t place(const int64_t (&stride)[2], int64_t row) const {
    return row / p_.inner * stride[0] + row % p_.inner * stride[1];
  }

  // The weight as numbers to compute with.
  const T* weights(const NormScratch<T>& scratch) const {
    if (!p_.weight) {
      for (int64_t c = 0; c < scratch.width; c += LANES<T>) store(scratch.weight + c, splat<T>(1));
      return scratch.weight;
    }
    if (p_.weight_type == TypeOf<T>::VALUE && scratch.width == p_.width) return static_cast<const T*>(p_.weight);
    for (int64_t r = 0; r < p_.weight_rows; ++r) {
      row_in(p_.weight, p_.weight_type, r * p_.width, p_.width, scratch.weight + r * scratch.width);
    }
    return scratch.weight;
  }
  const T* weight_of(const T* weights, int64_t row) const {
    return weights + (p_.weight ? row % p_.weight_rows : 0) * padded<T>(p_.width);
  }

  const T* gate_row(int64_t row, const NormScratch<T>& scratch) const {
    return row_in(p_.gate, p_.gate_type, place(p_.gate_stride, row), p_.width, scratch.gate);
  }

  F<T> act(F<T> gate) const {
    const F<T> s = sigmoid<T>(gate);
    return p_.activation == Activation::silu ? gate * s : s;
  }

  Bent<T> bend(F<T> gate) const {
    if (p_.activation == Activation::silu) return silu_of<T>(gate);
    const Sigmoid<T> s = sigmoid_of<T>(gate);
    return {s.value, s.value * s.rest};
  }

  T inverse(T squares) const { return 1 / root(squares * share_ + static_cast<T>(p_.eps)); }
  static float root(float x) { return __builtin_sqrtf(x); }
  static double root(double x) { return __builtin_sqrt(x); }

  template <Gating GATING>
  void forward_unit(int64_t unit, Arena arena) {
    const NormScratch<T> scratch(p_, arena);
    const T* weight = weights(scratch);
    const int64_t stop = least(rows_, (unit + 1) * group_);
    with_stored<T>(p_.type, [&](auto stored) {
      using E = decltype(stored);
      for (int64_t row = unit * group_; row < stop; ++row) {
        answer<GATING>(row, weight_of(weight, row), scratch, static_cast<E*>(p_.output) + row * p_.width);
      }
    });
  }

  template <Gating GATING, class E>
  void answer(int64_t row, const T* weight, const NormScratch<T>& scratch, E* output) const {
    const T* x = row_in(p_.x, p_.type, place(p_.x_stride, row), p_.width, scratch.x);
    const T* gate = nullptr;
    if (GATING != Gating::none) gate = gate_row(row, scratch);
    const F<T> scale = splat<T>(inverse(squares<GATING>(x, gate, scratch)));
    const T* from = GATING == Gating::first ? scratch.scaled : x;
    for (int64_t c = 0; c < p_.width; c += LANES<T>) {
      F<T> made = load(from + c) * scale * load(weight + c);
      if (GATING == Gating::after) made *= act(load(gate + c));
      store_some<T>(output + c, made, p_.width - c);
    }
  }

  // The sum of the squares of what is normed, which is left in scratch where the gate comes first.
  template <Gating GATING>
  T squares(const T* x, const T* gate, const NormScratch<T>& scratch) const {
    F<T> sums[4] = {};
    int64_t c = 0;
    const auto add = [&](F<T>& sum) {
      F<T> a = load(x + c);
      if (GATING == Gating::first) {
        a *= act(load(gate + c));
        store(scratch.scaled + c, a);
      }
      sum += a * a;
      c += LANES<T>;
    };
    while (c + 4 * LANES<T> <= scratch.width) {
      for (F<T>& sum : sums) add(sum);
    }
    while (c < scratch.width) add(sums[0]);
    return sum_of<T>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }

  template <Gating GATING>
  void backward_unit(int64_t unit, Arena arena) {
    const NormScratch<T> scratch(p_, arena);
    const T* weight = weights(scratch);
    const int64_t stop = least(rows_, (unit + 1) * group_), columns = p_.weight_rows * scratch.width;
    T* sums = sums_ ? sums_ + unit * columns : nullptr;
    if (sums) {
      for (int64_t c = 0; c < columns; c += LANES<T>) store(sums + c, F<T>{});
    }
    for (int64_t row = unit * group_; row < stop; ++row) {
      T* own = sums ? sums + row % p_.weight_rows * scratch.width : nullptr;
      give_back<GATING>(row, weight_of(weight, row), scratch, own);
    }
  }

  // With a what is normed, n = a · r and u the gradient of n: that of a is r · (u - n · share · sum(u · n)).
  template <Gating GATING>
  void give_back(int64_t row, const T* weight, const NormScratch<T>& scratch, T* sums) const {
    const T* x = row_in(p_.x, p_.type, place(p_.x_stride, row), p_.width, scratch.x);
    const T* given = row_in(g_.output, p_.type, place(g_.output_stride, row), p_.width, scratch.given);
    if (GATING != Gating::none) bend_row(row, scratch);
    F<T> squares{}, products{};
    for (int64_t c = 0; c < scratch.width; c += LANES<T>) {
      F<T> a = load(x + c), u = load(given + c) * load(weight + c);
      if (GATING == Gating::first) a *= load(scratch.bent + c);
      if (GATING == Gating::after) u *= load(scratch.bent + c);
      squares += a * a;
      products += u * a;
    }
    const T r = inverse(sum_of<T>(squares));
    const F<T> scale = splat<T>(r), pull = splat<T>(r * share_ * sum_of<T>(products));
    for (int64_t c = 0; c < scratch.width; c += LANES<T>) {
      const F<T> numbers = load(x + c), grad = load(given + c), factor = load(weight + c);
      const F<T> bent = GATING == Gating::none ? F<T>{} : load(scratch.bent + c);
      const F<T> n = (GATING == Gating::first ? numbers * bent : numbers) * scale;
      const F<T> u = GATING == Gating::after ? grad * factor * bent : grad * factor;
      if (sums) store(sums + c, load(sums + c) + (GATING == Gating::after ? grad * bent * n : grad * n));
      const F<T> inner = scale * (u - n * pull);  // the gradient of a
      store(scratch.scaled + c, GATING == Gating::first ? inner * bent : inner);
      if (GATING == Gating::none) continue;
      const F<T> of_gate = GATING == Gating::first ? inner * numbers : grad * factor * n;
      store(scratch.bent + c, of_gate * load(scratch.slope + c));
    }
    put(g_.x, p_.type, row, scratch.scaled);
    if (GATING != Gating::none) put(g_.gate, p_.gate_type, row, scratch.bent);
  }

  void bend_row(int64_t row, const NormScratch<T>& scratch) const {
    const T* gate = gate_row(row, scratch);
    for (int64_t c = 0; c < scratch.width; c += LANES<T>) {
      const Bent<T> made = bend(load(gate + c));
      store(scratch.bent + c, made.value);
      store(scratch.slope + c, made.slope);
    }
  }

  // A row of a dense gradient.
  void put(void* to, Type type, int64_t row, const T* from) const {
    if (!to) return;
    with_stored<T>(type, [&](auto stored) {
      using E = decltype(stored);
      E* at = static_cast<E*>(to) + row * p_.width;
      for (int64_t c = 0; c < p_.width; c += LANES<T>) store_some<T>(at + c, load(from + c), p_.width - c);
    });
  }

  const Norm& p_;
  const NormGradients& g_;
  int64_t rows_;
  T share_;
  int64_t group_;
  T* sums_ = nullptr;  // of the weight: (units, its rows, padded)
};

inline Status run_norm(const Norm& asked, const Run& run) {
  const NormGradients none{};
  if (asked.type == Type::float64) return NormPass<double>(asked, none).forward(run);
  return NormPass<float>(asked, none).forward(run);
}

inline Status run_norm_backward(const Norm& asked, const NormGradients& gradients, const Run& run) {
  if (asked.type == Type::float64) return NormPass<double>(asked, gradients).backward(run);
  return NormPass<float>(asked, gradients).backward(run);
}

}  // namespace
