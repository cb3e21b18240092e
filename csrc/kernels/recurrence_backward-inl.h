// The linear family, backward: each unit takes one head of one sequence from its last token to its first, from one
// checkpoint of the state to the one before, a part of the columns after the other.
#pragma once

#include "recurrence-inl.h"
#include "reverse-inl.h"

namespace {

using qkv::RecurrenceBackward;

template <class T>
struct RecurrenceBackwardScratch {
  ChunkScratch<T> chunk;
  ReverseScratch<T> reverse;
  T *query, *key, *gate;    // (CHUNK, wide): gradients of the numbers that came in
  T *raw;                   // (CHUNK, wide)
  T *sums;                  // (CHUNK): 1 over the denominators
  T *grad_norm;             // (wide): of the normaliser's column of the state
  T *grad_denominator;      // (CHUNK)
  T *row;                   // (V) of one token, twice

  RecurrenceBackwardScratch(const Recurrence& p, Arena& arena) : chunk(p, arena), reverse(p, arena) {
    T** const rows[] = {&query, &key, &gate, &raw};
    for (T** one : rows) *one = arena.take<T>(CHUNK * chunk.wide);
    sums = arena.take<T>(CHUNK);
    grad_denominator = arena.take<T>(CHUNK);
    grad_norm = arena.take<T>(chunk.wide);
    row = arena.take<T>(2 * padded<T>(p.value_dim));
  }
  void prepare(const Recurrence& p) {
    chunk.prepare(p);
    reverse.clear(p.key_dim);
  }
};

// What the normaliser adds to the gradients of a block: its column of the state is one more, of values that are 1.
template <class T>
struct Normaliser {
  const T *norm, *denominator;  // the column before the block; the gradients of the block's denominators
  T* grad_norm;                 // of the column after it, then before it
};

// From the gradients of reads, writes, decay and products of block n to those of q, k and g.
template <class T, bool DELTA, bool GATED>
void block_gradients(const Recurrence& p, int64_t n, RecurrenceBackwardScratch<T>& s, const Normaliser<T>* norm) {
  const ChunkScratch<T>& c = s.chunk;
  const ReverseScratch<T>& back = s.reverse;
  const T scale = static_cast<T>(p.normalize ? 1.0 : p.scale), *const weights = back.weights + n * BLOCK * BLOCK;
  const T* const inner = back.inner + n * BLOCK * BLOCK;
  for (int64_t i = 0; i < c.wide; i += LANES<T>) {
    Block<T> b;
    b.template load_at<GATED>(c, n * BLOCK, i);
    F<T> q[BLOCK], k[BLOCK], g[BLOCK], read[BLOCK], write[BLOCK], left = {};
    clear<T>(g);
#pragma GCC unroll 4
    for (int t = 0; t < BLOCK; ++t) {
      read[t] = load(back.reads + (n * BLOCK + t) * c.wide + i);
      write[t] = load(back.writes + (n * BLOCK + t) * c.wide + i);
    }
    if constexpr (GATED) left = load(back.decay + n * c.wide + i) * b.since[BLOCK - 1];
    if (norm) {
      const F<T> before = load(norm->norm + i), after = load(norm->grad_norm + i);
      F<T> sum = GATED ? after * b.since[BLOCK - 1] : after;
      if constexpr (GATED) left += after * before * b.since[BLOCK - 1];
      for (int t = 0; t < BLOCK; ++t) {
        const F<T> q_read = GATED ? b.q[t] * scale * b.since[t] : b.q[t] * scale;
        read[t] += before * norm->denominator[t];
        write[t] += after;
        sum += q_read * norm->denominator[t];
      }
      store(norm->grad_norm + i, sum);
    }
    // Reads and writes of the state. Before token r all gates up to r have acted on a read, those after s on a write.
    F<T> ends = splat<T>(1);
#pragma GCC unroll 4
    for (int t = BLOCK - 1; t >= 0; --t) {
      F<T> seen = {};
      if constexpr (GATED) {
        q[t] = b.since[t] * read[t] * scale;
        k[t] = ends * write[t];
        seen = b.q[t] * q[t];
        const F<T> kept = b.k[t] * k[t];
#pragma GCC unroll 4
        for (int r = t + 1; r < BLOCK; ++r) g[r] += kept;
        ends *= b.w[t];
      } else {
        q[t] = read[t] * scale;
        k[t] = write[t];
      }
      if constexpr (DELTA) {
        const F<T> erase = load(back.erases + (n * BLOCK + t) * c.wide + i);
        const F<T> asked = GATED ? b.since[t] * erase : erase;
        k[t] += asked;
        if constexpr (GATED) seen += b.k[t] * asked;
      }
      if constexpr (GATED) {
#pragma GCC unroll 4
        for (int r = 0; r <= t; ++r) g[r] += seen;
        g[t] += left;
      }
    }
    // Products of two tokens.
#pragma GCC unroll 4
    for (int t = 0; t < BLOCK; ++t) {
      F<T> passed = splat<T>(1);
#pragma GCC unroll 4
      for (int r = t; r >= 0; --r) {
        const T weight = (weights[t * BLOCK + r] + (norm ? norm->denominator[t] : T(0))) * scale;
        q[t] += weight * b.faded[t][r];
        F<T> from = weight * b.q[t];
        if (DELTA && r < t) {
          k[t] += inner[t * BLOCK + r] * b.faded[t][r];
          from += inner[t * BLOCK + r] * b.k[t];
        }
        if constexpr (GATED) {
          k[r] += from * passed;
          const F<T> product = from * b.faded[t][r];
#pragma GCC unroll 4
          for (int between = r + 1; between <= t; ++between) g[between] += product;
          passed *= b.w[r];
        } else {
          k[r] += from;
        }
      }
    }
#pragma GCC unroll 4
    for (int t = 0; t < BLOCK; ++t) {
      const int64_t at = (n * BLOCK + t) * c.wide + i;
      store(s.query + at, q[t]);
      store(s.key + at, k[t]);
      if constexpr (GATED) store(s.gate + at, g[t]);
    }
  }
}

template <class T, bool DELTA, bool GATED>
class RecurrenceBackwardPass {
  using Scratch = RecurrenceBackwardScratch<T>;

 public:
  RecurrenceBackwardPass(const Recurrence& problem, const RecurrenceBackward& data) : p_(problem), data_(data) {}

  Status run(const Run& run) {
    parts_ = most(1, blocks_of(p_.value_dim, PART));
    const bool narrow = p_.type != TypeOf<T>::VALUE;
    tokens_ = p_.starts ? p_.starts[p_.sequences] : p_.length;
    const int64_t batch = p_.starts ? 1 : p_.sequences, group = p_.heads / p_.key_heads;
    apart_ = group > 1 || (narrow && parts_ > 1);
    const size_t bytes = sizeof(T) * static_cast<size_t>(batch * p_.heads * tokens_ * p_.key_dim);
    if (apart_ && !(query_.reserve(bytes) && key_.reserve(bytes))) return Status::out_of_memory;
    Status status = each(*this, p_, run, p_.sequences * p_.heads, &RecurrenceBackwardPass::unit);
    if (apart_ && status == Status::ok) {
      status = each(*this, p_, run, p_.sequences * p_.key_heads, &RecurrenceBackwardPass::gather_unit);
    }
    return status;
  }

 private:
  void unit(int64_t unit, Scratch& scratch, Worker& worker) {
    const Flushing flushing;
    const Lane lane(p_, unit);
    for (int64_t part = 0; part < parts_; ++part) columns(lane, part * PART, scratch, worker);
  }

  void columns(const Lane& lane, int64_t column, Scratch& s, Worker& worker) {
    const int64_t count = least(PART, p_.value_dim - column), width = Lane::width(p_), rows = p_.key_dim;
    const bool norm = p_.normalize && column == 0;
    const T* after = data_.grad_after ? static_cast<const T*>(data_.grad_after) + lane.state(p_) : nullptr;
    load_columns(after ? after + column : nullptr, width, count, s.reverse.grad_state, s.reverse.columns);
    for (int64_t i = 0; i < s.chunk.wide; ++i) {
      s.grad_norm[i] = norm && after && i < rows ? after[i * width + p_.value_dim] : 0;
    }
    for (int64_t chunk = lane.chunks() - 1; chunk >= 0 && !worker.stopped(); --chunk) {
      chunk_gradients(lane, chunk, column, count, s);
    }
    if (!data_.grad_before) return;
    T* const before = static_cast<T*>(data_.grad_before) + lane.state(p_);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t c = 0; c < count; ++c) before[i * width + column + c] = s.reverse.grad_state[i * s.reverse.columns + c];
      if (norm) before[i * width + p_.value_dim] = s.grad_norm[i];
    }
  }

  void chunk_gradients(const Lane& lane, int64_t chunk, int64_t column, int64_t count, Scratch& s) {
    const int64_t rows = p_.key_dim, width = Lane::width(p_), tokens = lane.tokens(chunk);
    const T* const kept = static_cast<const T*>(data_.checkpoints) + (lane.checkpoint + chunk) * rows * width;
    ReverseScratch<T>& back = s.reverse;
    if (p_.normalize) {
      for (int64_t i = 0; i < s.chunk.wide; ++i) s.chunk.norm[i] = i < rows ? kept[i * width + p_.value_dim] : 0;
    }
    prepare_chunk<T, DELTA, GATED>(p_, data_, lane, chunk, s.chunk);
    load_columns(kept + column, width, count, back.states, back.columns);
    load_tokens(part(lane.rows(data_.value, p_.type, p_.value, lane.head, chunk), column), count, s.chunk.ones,
                back.value, back.columns);
    const Rows output = lane.rows(data_.grad_output, p_.type, data_.grad_output_stride, lane.head, chunk);
    load_tokens(part(output, column), count, factors(lane, chunk, output, column, s), back.grad_output, back.columns);
    const int64_t blocks = blocks_of(tokens, BLOCK);
    for (int64_t c = 0; c < back.columns; c += TILE_WIDTH<T>) {
      retrace<T, DELTA, GATED>(s.chunk, back, rows, blocks, c);
    }
    reverse<T, DELTA, GATED>(s.chunk, back, rows, tokens);
    for (int64_t n = blocks - 1; n >= 0; --n) {
      const Normaliser<T> norm{s.chunk.norms + n * s.chunk.wide, s.grad_denominator + n * BLOCK, s.grad_norm};
      block_gradients<T, DELTA, GATED>(p_, n, s, p_.normalize && column == 0 ? &norm : nullptr);
    }
    if (data_.grad_value) {
      store_rows(back.grad_value, back.columns, count, s.chunk.ones,
                 part(lane.rows(data_.grad_value, p_.type, data_.grad_value_stride, lane.head, chunk), column));
    }
    give(lane, chunk, column, {data_.query, p_.query}, query(), s.query, s);
    give(lane, chunk, column, {data_.key, p_.key}, key(), s.key, s);
    if (GATED && data_.grad_gate) give_gate(lane, chunk, column, s);
    if (DELTA && data_.grad_beta) give_beta(lane, chunk, column, s);
  }

  // The factor of each row of the gradient of the output: 1, or 1 over the denominator, whose own gradient is then made.
  const T* factors(const Lane& lane, int64_t chunk, const Rows& grad_output, int64_t column, Scratch& s) const {
    if (!p_.normalize) return s.chunk.ones;
    const Rows output = lane.rows(data_.output, p_.output_type, p_.output, lane.head, chunk);
    for (int64_t t = 0; t < CHUNK; ++t) {
      const T denominator = t < output.count ? s.chunk.denominator[t] : 0;
      s.sums[t] = denominator == 0 ? 0 : 1 / denominator;
      s.grad_denominator[t] = 0;
      if (column == 0 && denominator != 0) s.grad_denominator[t] = -product(grad_output, output, t, s) * s.sums[t];
    }
    return s.sums;
  }

  // Over all columns of one row of both.
  T product(const Rows& a, const Rows& b, int64_t t, Scratch& s) const {
    const int64_t wide = padded<T>(p_.value_dim);
    Rows one = a, other = b;
    one.first = other.first = t;
    one.count = other.count = 1;
    load_rows(one, p_.value_dim, s.chunk.ones, s.row, wide);
    load_rows(other, p_.value_dim, s.chunk.ones, s.row + wide, wide);
    F<T> sum = {};
    for (int64_t c = 0; c < wide; c += LANES<T>) sum += load(s.row + c) * load(s.row + wide + c);
    return total(sum);
  }

  static T total(F<T> sum) {
    T all = 0;
    for (int lane = 0; lane < LANES<T>; ++lane) all += sum[lane];
    return all;
  }

  struct Tensor {
    const void* data;
    Stride stride;
  };
  // The gradient of q or k: the caller's, and the memory of the call where several parts or heads add to it first.
  struct Shared {
    void* data;
    Stride stride;
    const Buffer& apart;
  };
  Shared query() const { return {data_.grad_query, data_.grad_query_stride, query_}; }
  Shared key() const { return {data_.grad_key, data_.grad_key_stride, key_}; }

  void give(const Lane& lane, int64_t chunk, int64_t column, const Tensor& raw, const Shared& grad, T* rows, Scratch& s) {
    if (!grad.data) return;
    if (p_.feature != Feature::none) {
      load_rows(lane.rows(raw.data, p_.type, raw.stride, lane.key_head, chunk), p_.key_dim, s.chunk.ones, s.raw,
                s.chunk.wide);
      for (int64_t i = 0; i < lane.tokens(chunk) * s.chunk.wide; i += LANES<T>) {
        store(rows + i, load(rows + i) * slope_of<T>(p_.feature, load(s.raw + i)));
      }
    }
    const Rows to = apart_ ? own(grad.apart, lane, lane.head, chunk)
                           : lane.rows(grad.data, p_.type, grad.stride, lane.key_head, chunk);
    if (column > 0) add_rows(to, rows, s);
    store_rows(rows, s.chunk.wide, p_.key_dim, s.chunk.ones, to);
  }

  void add_rows(const Rows& to, T* rows, Scratch& s) const {
    load_rows(to, p_.key_dim, s.chunk.ones, s.raw, s.chunk.wide);
    for (int64_t i = 0; i < to.count * s.chunk.wide; i += LANES<T>) store(rows + i, load(rows + i) + load(s.raw + i));
  }

  // Rows of memory of the call, (B, H, L, D).
  Rows own(const Buffer& apart, const Lane& lane, int64_t head, int64_t chunk) const {
    const Stride stride{p_.heads * tokens_ * p_.key_dim, tokens_ * p_.key_dim, p_.key_dim};
    return lane.rows(apart.data(), TypeOf<T>::VALUE, stride, head, chunk);
  }

  // The sum over the value heads that read a key head, in their order.
  void gather_unit(int64_t unit, Scratch& s, Worker& worker) {
    const int64_t group = p_.heads / p_.key_heads, key_head = unit % p_.key_heads;
    const Lane lane(p_, unit / p_.key_heads * p_.heads + key_head * group);
    for (int64_t chunk = 0; chunk < lane.chunks() && !worker.stopped(); ++chunk) {
      if (data_.grad_query) gather(lane, chunk, query(), s);
      if (data_.grad_key) gather(lane, chunk, key(), s);
    }
  }

  void gather(const Lane& lane, int64_t chunk, const Shared& grad, Scratch& s) {
    T* const sum = s.query;
    load_rows(own(grad.apart, lane, lane.head, chunk), p_.key_dim, s.chunk.ones, sum, s.chunk.wide);
    for (int64_t h = 1; h < p_.heads / p_.key_heads; ++h) add_rows(own(grad.apart, lane, lane.head + h, chunk), sum, s);
    store_rows(sum, s.chunk.wide, p_.key_dim, s.chunk.ones,
               lane.rows(grad.data, p_.type, grad.stride, lane.key_head, chunk));
  }

  void give_gate(const Lane& lane, int64_t chunk, int64_t column, Scratch& s) {
    const bool alike = p_.gates == Gates::scalar;
    const int64_t width = alike ? 1 : p_.key_dim;
    T* to = static_cast<T*>(data_.grad_gate) + (lane.batch * p_.heads + lane.head) * tokens_ * width +
            (lane.first + chunk * CHUNK) * width;
    for (int64_t t = 0; t < lane.tokens(chunk); ++t, to += width) {
      const T* row = s.gate + t * s.chunk.wide;
      if (alike) {
        F<T> sum = {};
        for (int64_t i = 0; i < s.chunk.wide; i += LANES<T>) sum += load(row + i);
        *to = (column > 0 ? *to : 0) + total(sum);
      } else {
        for (int64_t i = 0; i < width; ++i) to[i] = (column > 0 ? to[i] : 0) + row[i];
      }
    }
  }

  void give_beta(const Lane& lane, int64_t chunk, int64_t column, Scratch& s) {
    T* to = static_cast<T*>(data_.grad_beta) + (lane.batch * p_.heads + lane.head) * tokens_ + lane.first + chunk * CHUNK;
    for (int64_t t = 0; t < lane.tokens(chunk); ++t) {
      const T own = s.reverse.inner[t / BLOCK * BLOCK * BLOCK + t % BLOCK * (BLOCK + 1)];
      to[t] = (column > 0 ? to[t] : 0) + own;
    }
  }

  // Rows of columns of a state (D, W), zeros beyond them. Null: zeros.
  void load_columns(const T* from, int64_t width, int64_t count, T* to, int64_t to_stride) const {
    for (int64_t i = 0; i < p_.key_dim; ++i, to += to_stride) {
      for (int64_t c = 0; c < to_stride; ++c) to[c] = from && c < count ? from[i * width + c] : 0;
    }
  }

  static Rows part(Rows rows, int64_t column) {
    rows.data = static_cast<const char*>(rows.data) + column * size_of(rows.type);
    return rows;
  }

  const Recurrence& p_;
  const RecurrenceBackward& data_;
  int64_t parts_ = 1, tokens_ = 0;
  bool apart_ = false;
  Buffer query_, key_;
};

template <class T>
Status recur_backward_as(const Recurrence& problem, const RecurrenceBackward& data, const Run& run) {
  const bool gated = problem.gates != Gates::none;
  if (problem.delta) {
    return gated ? RecurrenceBackwardPass<T, true, true>(problem, data).run(run)
                 : RecurrenceBackwardPass<T, true, false>(problem, data).run(run);
  }
  return gated ? RecurrenceBackwardPass<T, false, true>(problem, data).run(run)
               : RecurrenceBackwardPass<T, false, false>(problem, data).run(run);
}

inline Status run_recurrence_backward(const Recurrence& problem, const RecurrenceBackward& data, const Run& run) {
  return problem.type == Type::float64 ? recur_backward_as<double>(problem, data, run)
                                       : recur_backward_as<float>(problem, data, run);
}

}  // namespace
