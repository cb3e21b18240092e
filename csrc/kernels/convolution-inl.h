// The short causal convolution, channel by channel, with its activation; forward and backward.
//
// Row i of a sequence is row i of its history, which has K - 1, or token i - K + 1: output t reads the rows t to
// t + K - 1. A unit of work is a stretch of rows of one sequence and a block of channels; all of it is the same for any
// number of threads.
#pragma once

#include <string.h>

#include "beside-inl.h"
#include "rows-inl.h"

namespace {

using qkv::Convolution;
using qkv::ConvolutionGradients;
using qkv::MOST_TAPS;

constexpr int64_t STRETCH = 256, AT_ONCE = 16, TOKENS = 4;  // rows of a unit, of them at once, and in registers
constexpr int64_t CHANNELS = 256;                         // of a unit

// The stretches of all sequences, one after another.
class Stretches {
 public:
  explicit Stretches(const Convolution& asked) : asked_(asked) {}

  // False: out of memory.
  bool count() {
    if (!asked_.starts) {
      each_ = blocks_of(asked_.length + asked_.taps - 1, STRETCH);
      total_ = asked_.sequences * each_;
      return true;
    }
    if (!ends_.reserve(static_cast<size_t>(asked_.sequences) * sizeof(int64_t))) return false;
    for (int64_t n = 0; n < asked_.sequences; ++n) {
      total_ += blocks_of(asked_.starts[n + 1] - asked_.starts[n] + asked_.taps - 1, STRETCH);
      ends()[n] = total_;
    }
    return true;
  }

  int64_t total() const { return total_; }

  struct Place {
    int64_t sequence, first;  // row of the sequence
  };
  Place at(int64_t stretch) const {
    if (!asked_.starts) return {stretch / each_, stretch % each_ * STRETCH};
    int64_t low = 0, high = asked_.sequences - 1;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (ends()[middle] > stretch) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return {low, (stretch - (low ? ends()[low - 1] : 0)) * STRETCH};
  }

 private:
  int64_t* ends() const { return static_cast<int64_t*>(ends_.data()); }

  const Convolution& asked_;
  Buffer ends_;
  int64_t each_ = 0, total_ = 0;
};

// What one unit has of the call.
template <class T>
struct ConvolutionScratch {
  explicit ConvolutionScratch(Arena& arena)
      : weight(arena.take<T>((MOST_TAPS + 1) * CHANNELS)),
        none(arena.take<T>(CHANNELS)),
        rows(arena.take<T>((AT_ONCE + MOST_TAPS) * CHANNELS)),
        bent(arena.take<T>((AT_ONCE + MOST_TAPS) * CHANNELS)),
        given(arena.take<T>(AT_ONCE * CHANNELS)),
        sums(arena.take<T>((MOST_TAPS + 1) * CHANNELS)) {}

  static size_t bytes() {
    Arena measure(nullptr);
    ConvolutionScratch made(measure);
    return measure.used();
  }

  T *weight;  // taps, then the bias, padded
  T* none;    // zeros
  T* rows;    // copies of rows
  T* bent;    // gradients before the activation, of K - 1 tokens and of a chunk
  T* given;   // copies of gradients of the output
  T* sums;    // gradients of the taps, then of the bias
};

template <class T>
class ConvolutionPass {
 public:
  ConvolutionPass(const Convolution& asked, const ConvolutionGradients& gradients)
      : p_(asked), g_(gradients), stretches_(asked), blocks_(blocks_of(asked.channels, CHANNELS)) {}

  Status forward(const Run& run) {
    if (!stretches_.count()) return Status::out_of_memory;
    return units(run, &ConvolutionPass::forward_unit);
  }

  Status backward(const Run& run) {
    if (!stretches_.count()) return Status::out_of_memory;
    const int64_t columns = (p_.taps + 1) * p_.channels;
    Buffer sums;
    if (summed()) {
      if (!sums.reserve(static_cast<size_t>(stretches_.total() * columns) * sizeof(T))) return Status::out_of_memory;
      sums_ = static_cast<T*>(sums.data());
    }
    const Status status = units(run, &ConvolutionPass::backward_unit);
    if (status != Status::ok || !summed()) return status;
    return sum_rows<T>(run, sums_, stretches_.total(), columns, [this](int64_t column, T sum) {
      const int64_t k = column / p_.channels, c = column % p_.channels;
      if (k < p_.taps && g_.weight) static_cast<T*>(g_.weight)[c * p_.taps + k] = sum;
      if (k == p_.taps && g_.bias) static_cast<T*>(g_.bias)[c] = sum;
    });
  }

 private:
  struct Piece {
    int64_t stretch, sequence, start, length;  // token 0 of the sequence in the row that it lies in, and its tokens
    int64_t first, stop;                       // rows
    int64_t channel, width;
  };

  bool summed() const { return g_.weight || g_.bias; }

  Status units(const Run& run, void (ConvolutionPass::*method)(int64_t, Arena)) {
    const int64_t units = stretches_.total() * blocks_;
    const Run how = run_for(run, stretches_.total() * least(STRETCH, p_.length) * p_.channels);
    return each_of(*this, how, units, ConvolutionScratch<T>::bytes(), method);
  }

  Piece piece(int64_t unit) const {
    const auto [n, first] = stretches_.at(unit / blocks_);
    const int64_t start = p_.starts ? p_.starts[n] : 0, length = p_.starts ? p_.starts[n + 1] - start : p_.length;
    const int64_t channel = unit % blocks_ * CHANNELS;
    return {unit / blocks_, n,       start, length, first, least(first + STRETCH, length + p_.taps - 1),
            channel,        least(CHANNELS, p_.channels - channel)};
  }

  // Where token t lies in a tensor of those strides; in a dense one.
  int64_t place(const Piece& at, const int64_t (&stride)[2], int64_t t) const {
    return (p_.starts ? 0 : at.sequence) * stride[0] + (at.start + t) * stride[1] + at.channel;
  }
  int64_t dense(const Piece& at, int64_t t) const {
    return ((p_.starts ? 0 : at.sequence) * p_.length + at.start + t) * p_.channels + at.channel;
  }
  int64_t kept(const Piece& at, int64_t i) const {  // row i of a tail
    return (at.sequence * (p_.taps - 1) + i) * p_.channels + at.channel;
  }

  const T* row(const Piece& at, int64_t i, const ConvolutionScratch<T>& scratch, T* room) const {
    if (i >= p_.taps - 1) return row_in(p_.x, p_.type, place(at, p_.x_stride, i - p_.taps + 1), at.width, room);
    return p_.before ? row_in(p_.before, p_.type, kept(at, i), at.width, room) : scratch.none;
  }

  // weight[k][c], and the bias in the row behind.
  void prepare(const Piece& at, const ConvolutionScratch<T>& scratch) const {
    const int64_t wide = padded<T>(at.width);
    for (int64_t c = 0; c < wide; c += LANES<T>) store(scratch.none + c, F<T>{});
    T* bias = scratch.weight + p_.taps * CHANNELS;
    const T* from = p_.bias ? row_in(p_.bias, p_.weight_type, at.channel, at.width, bias) : scratch.none;
    if (from != bias) memcpy(bias, from, static_cast<size_t>(wide) * sizeof(T));
    with_stored<T>(p_.weight_type, [&](auto stored) {
      using E = decltype(stored);
      const E* weight = static_cast<const E*>(p_.weight) + at.channel * p_.taps;
      const int64_t whole = p_.taps == 4 ? at.width / LANES<T> * LANES<T> : 0;
      for (int64_t c = 0; c < whole; c += LANES<T>) turn_four(weight + c * 4, scratch.weight + c);
      for (int64_t k = 0; k < p_.taps; ++k) {
        T* to = scratch.weight + k * CHANNELS;
        for (int64_t c = whole; c < at.width; ++c) to[c] = number_as<T>(weight[c * p_.taps + k]);
      }
    });
  }

  // The taps of LANES channels, four each, as four rows: a shuffle of all four vectors for each bit of a lane's number.
  template <class E>
  static void turn_four(const E* from, T* to) {
    F<T> v[4], next[4];
    for (int i = 0; i < 4; ++i) v[i] = load_as<T>(from + i * LANES<T>);
#pragma GCC unroll 4
    for (int step = 1; step < LANES<T>; step *= 2) {
      for (int i = 0; i < 2; ++i) {
        next[2 * i] = interleave<T, false>(v[i], v[i + 2]);
        next[2 * i + 1] = interleave<T, true>(v[i], v[i + 2]);
      }
      for (int i = 0; i < 4; ++i) v[i] = next[i];
    }
    for (int i = 0; i < 4; ++i) store(to + i * CHANNELS, v[i]);
  }

  // What the taps make of N tokens, before the activation.
  template <int N>
  void convolve(const ConvolutionScratch<T>& scratch, const T* const* rows, int64_t lane, F<T> (&sum)[N]) const {
    const F<T> bias = load(scratch.weight + p_.taps * CHANNELS + lane);
#pragma GCC unroll 4
    for (int t = 0; t < N; ++t) sum[t] = bias;
    for (int64_t k = 0; k < p_.taps; ++k) {
      const F<T> weight = load(scratch.weight + k * CHANNELS + lane);
#pragma GCC unroll 4
      for (int t = 0; t < N; ++t) sum[t] += weight * load(rows[t + k] + lane);
    }
  }

  void forward_unit(int64_t unit, Arena arena) {
    const ConvolutionScratch<T> scratch(arena);
    const Piece at = piece(unit);
    prepare(at, scratch);
    const int64_t stop = least(at.stop, at.length);
    for (int64_t first = at.first; first < stop; first += AT_ONCE) {
      const int64_t count = least(AT_ONCE, stop - first);
      const T* rows[AT_ONCE + MOST_TAPS];
      gather(at, first, count, scratch, rows);
      with_stored<T>(p_.type, [&](auto stored) {
        using E = decltype(stored);
        E* output = static_cast<E*>(p_.output) + dense(at, first);
        int64_t t = 0;
        for (; t + TOKENS <= count; t += TOKENS) answer<TOKENS>(at, scratch, rows + t, output + t * p_.channels);
        for (; t < count; ++t) answer<1>(at, scratch, rows + t, output + t * p_.channels);
      });
    }
    if (at.first == 0 && p_.after) keep(at);
  }

  // All rows that some outputs read.
  void gather(const Piece& at, int64_t first, int64_t count, const ConvolutionScratch<T>& scratch,
              const T** rows) const {
    for (int64_t i = 0; i < count + p_.taps - 1; ++i) {
      rows[i] = row(at, first + i, scratch, scratch.rows + i * CHANNELS);
    }
  }

  template <int N, class E>
  void answer(const Piece& at, const ConvolutionScratch<T>& scratch, const T* const* rows, E* output) const {
    for (int64_t lane = 0; lane < at.width; lane += LANES<T>) {
      F<T> sum[N];
      convolve<N>(scratch, rows, lane, sum);
#pragma GCC unroll 4
      for (int t = 0; t < N; ++t) {
        const F<T> made = p_.silu ? sum[t] * sigmoid<T>(sum[t]) : sum[t];
        store_some<T>(output + t * p_.channels + lane, made, at.width - lane);
      }
    }
  }

  // The last K - 1 rows of the sequence, in ascending order: each comes from itself or from a later one of the tail.
  void keep(const Piece& at) const {
    const int64_t size = size_of(p_.type);
    const size_t bytes = static_cast<size_t>(at.width * size);
    for (int64_t i = 0; i < p_.taps - 1; ++i) {
      char* to = static_cast<char*>(p_.after) + kept(at, i) * size;
      const int64_t from = at.length + i;
      if (from >= p_.taps - 1) {
        memcpy(to, static_cast<const char*>(p_.x) + place(at, p_.x_stride, from - p_.taps + 1) * size, bytes);
      } else if (p_.before) {
        memmove(to, static_cast<const char*>(p_.before) + kept(at, from) * size, bytes);
      } else {
        memset(to, 0, bytes);
      }
    }
  }

  void backward_unit(int64_t unit, Arena arena) {
    const ConvolutionScratch<T> scratch(arena);
    const Piece at = piece(unit);
    const int64_t halo = p_.taps - 1;
    prepare(at, scratch);
    if (sums_) {
      for (int64_t i = 0; i < (p_.taps + 1) * CHANNELS; i += LANES<T>) store(scratch.sums + i, F<T>{});
    }
    bend<false>(at, at.first - halo, halo, scratch, scratch.bent);
    for (int64_t first = at.first; first < at.stop; first += AT_ONCE) {
      const int64_t count = least(AT_ONCE, at.stop - first);
      T* fresh = scratch.bent + halo * CHANNELS;
      if (sums_) {
        bend<true>(at, first, count, scratch, fresh);
      } else {
        bend<false>(at, first, count, scratch, fresh);
      }
      for (int64_t i = 0; i < count; ++i) give_back(at, first + i, scratch, fresh + i * CHANNELS);
      memmove(scratch.bent, scratch.bent + count * CHANNELS, static_cast<size_t>(halo * CHANNELS) * sizeof(T));
    }
    if (sums_) leave_sums(at, scratch);
  }

  // Gradients before the activation of some tokens, zeros for those that are none.
  template <bool SUM>
  void bend(const Piece& at, int64_t first, int64_t count, const ConvolutionScratch<T>& scratch, T* bent) const {
    const int64_t begin = least(most(0, -first), count), end = most(begin, least(count, at.length - first));
    for (int64_t t = 0; t < count; ++t) {
      if (t >= begin && t < end) continue;
      for (int64_t lane = 0; lane < at.width; lane += LANES<T>) store(bent + t * CHANNELS + lane, F<T>{});
    }
    if (begin == end) return;
    const T *rows[AT_ONCE + MOST_TAPS], *given[AT_ONCE];
    gather(at, first + begin, end - begin, scratch, rows);
    for (int64_t t = 0; t < end - begin; ++t) {
      const int64_t from = place(at, g_.output_stride, first + begin + t);
      given[t] = row_in(g_.output, p_.type, from, at.width, scratch.given + t * CHANNELS);
    }
    int64_t t = 0;
    for (; t + TOKENS <= end - begin; t += TOKENS) {
      bend_some<TOKENS, SUM>(at, scratch, rows + t, given + t, bent + (begin + t) * CHANNELS);
    }
    for (; t < end - begin; ++t) bend_some<1, SUM>(at, scratch, rows + t, given + t, bent + (begin + t) * CHANNELS);
  }

  template <int N, bool SUM>
  void bend_some(const Piece& at, const ConvolutionScratch<T>& scratch, const T* const* rows, const T* const* given,
                 T* bent) const {
    for (int64_t lane = 0; lane < at.width; lane += LANES<T>) {
      F<T> grad[N];
      if (p_.silu) {
        F<T> sum[N];
        convolve<N>(scratch, rows, lane, sum);
#pragma GCC unroll 4
        for (int t = 0; t < N; ++t) grad[t] = load(given[t] + lane) * silu_of<T>(sum[t]).slope;
      } else {
#pragma GCC unroll 4
        for (int t = 0; t < N; ++t) grad[t] = load(given[t] + lane);
      }
#pragma GCC unroll 4
      for (int t = 0; t < N; ++t) store(bent + t * CHANNELS + lane, grad[t]);
      if (SUM) add_sums<N>(scratch, rows, lane, grad);
    }
  }

  template <int N>
  void add_sums(const ConvolutionScratch<T>& scratch, const T* const* rows, int64_t lane, const F<T> (&grad)[N]) const {
    for (int64_t k = 0; k < p_.taps; ++k) {
      F<T> sum = load(scratch.sums + k * CHANNELS + lane);
#pragma GCC unroll 4
      for (int t = 0; t < N; ++t) sum += grad[t] * load(rows[t + k] + lane);
      store(scratch.sums + k * CHANNELS + lane, sum);
    }
    F<T> sum = load(scratch.sums + p_.taps * CHANNELS + lane);
#pragma GCC unroll 4
    for (int t = 0; t < N; ++t) sum += grad[t];
    store(scratch.sums + p_.taps * CHANNELS + lane, sum);
  }

  // The gradient of row i, from those of the outputs i - K + 1 to i, the last of which stands at `bent`; and as a row
  // of the tail that comes after.
  void give_back(const Piece& at, int64_t i, const ConvolutionScratch<T>& scratch, const T* bent) const {
    const int64_t token = i - p_.taps + 1;
    void* to = token < 0 ? g_.before : g_.x;
    if (!to) return;
    const T* after = scratch.none;
    if (i >= at.length && g_.after) {
      after = row_in(g_.after, p_.type, kept(at, i - at.length), at.width, scratch.given);
    }
    with_stored<T>(p_.type, [&](auto stored) {
      using E = decltype(stored);
      E* row = static_cast<E*>(to) + (token < 0 ? kept(at, i) : dense(at, token));
      for (int64_t lane = 0; lane < at.width; lane += LANES<T>) {
        F<T> sum = load(after + lane);
        for (int64_t k = 0; k < p_.taps; ++k) {
          sum += load(scratch.weight + k * CHANNELS + lane) * load(bent - k * CHANNELS + lane);
        }
        store_some<T>(row + lane, sum, at.width - lane);
      }
    });
  }

  void leave_sums(const Piece& at, const ConvolutionScratch<T>& scratch) const {
    for (int64_t k = 0; k <= p_.taps; ++k) {
      T* to = sums_ + (at.stretch * (p_.taps + 1) + k) * p_.channels + at.channel;
      memcpy(to, scratch.sums + k * CHANNELS, static_cast<size_t>(at.width) * sizeof(T));
    }
  }

  const Convolution& p_;
  const ConvolutionGradients& g_;
  Stretches stretches_;
  int64_t blocks_;
  T* sums_ = nullptr;  // of the taps and the bias: (stretches, K + 1, C)
};

inline Status run_convolution(const Convolution& asked, const Run& run) {
  const ConvolutionGradients none{};
  if (asked.type == Type::float64) return ConvolutionPass<double>(asked, none).forward(run);
  return ConvolutionPass<float>(asked, none).forward(run);
}

inline Status run_convolution_backward(const Convolution& asked, const ConvolutionGradients& gradients,
                                       const Run& run) {
  if (asked.type == Type::float64) return ConvolutionPass<double>(asked, gradients).backward(run);
  return ConvolutionPass<float>(asked, gradients).backward(run);
}

}  // namespace
