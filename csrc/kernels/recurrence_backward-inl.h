// The linear family, backward: each unit takes one head of one sequence from its last token to its first, from one
// checkpoint of the state to the one before.
#pragma once

#include "recurrence-inl.h"
#include "reverse-inl.h"

namespace {

using qkv::RecurrenceBackward;

// Gradients of what the blocks of a chunk read, erase, write and keep, and of their inner products.
template <class T>
struct BlockGradients {
  T *reads, *erases, *writes, *decay, *inner, *weights;

  void take(int64_t wide, Arena& arena) {
    T** const rows[] = {&reads, &erases, &writes};
    for (T** one : rows) *one = arena.take<T>(CHUNK * wide);
    decay = arena.take<T>(BLOCKS * wide);
    inner = arena.take<T>(CHUNK * BLOCK);
    weights = arena.take<T>(CHUNK * BLOCK);
  }

  // Add those of one part of the columns to the ones before, if any.
  void add(const ReverseScratch<T>& part, int64_t count, bool first) {
    const int64_t rows = blocks_of(count, BLOCK) * BLOCK * part.wide;
    add(part.reads, rows, first, reads);
    add(part.erases, rows, first, erases);
    add(part.writes, rows, first, writes);
    add(part.decay, rows / BLOCK, first, decay);
    add(part.inner, CHUNK * BLOCK, first, inner);
    add(part.weights, CHUNK * BLOCK, first, weights);
  }

 private:
  static void add(const T* from, int64_t count, bool first, T* to) {
    for (int64_t i = 0; i < count; i += LANES<T>) store(to + i, first ? load(from + i) : load(to + i) + load(from + i));
  }
};

template <class T>
struct RecurrenceBackwardScratch {
  ChunkScratch<T> chunk;
  ReverseScratch<T> reverse;
  BlockGradients<T> whole;  // over the parts
  T *query, *key, *gate;    // (CHUNK, wide): gradients of the numbers that came in
  T *raw;                   // (CHUNK, wide)
  T *sums;                  // (CHUNK): 1 over the denominators
  T *grad_norm;             // (wide): of the normaliser's column of the state
  T *grad_denominator;      // (CHUNK)
  T *row;                   // (V) of one token, twice

  RecurrenceBackwardScratch(const Recurrence& p, Arena& arena) : chunk(p, arena), reverse(p, arena) {
    whole.take(chunk.wide, arena);
    T** const rows[] = {&query, &key, &gate, &raw};
    for (T** one : rows) *one = arena.take<T>(CHUNK * chunk.wide);
    sums = arena.take<T>(CHUNK);
    grad_denominator = arena.take<T>(CHUNK);
    grad_norm = arena.take<T>(chunk.wide);
    row = arena.take<T>(2 * padded<T>(p.value_dim));
  }
  void prepare(const Recurrence& p) {
    chunk.prepare(p);
    reverse.clear(p.key_dim, blocks_of(p.value_dim, PART));
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
  const BlockGradients<T>& back = s.whole;
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
    tokens_ = p_.starts ? p_.starts[p_.sequences] : p_.length;
    apart_ = p_.heads > p_.key_heads;
    const int64_t batch = p_.starts ? 1 : p_.sequences;
    const size_t bytes = sizeof(T) * static_cast<size_t>(batch * p_.heads * tokens_ * p_.key_dim);
    if (!chunks_.count(p_)) return Status::out_of_memory;
    if (apart_ && !(query_.reserve(bytes) && key_.reserve(bytes))) return Status::out_of_memory;
    Status status = each(*this, p_, run, p_.sequences * p_.heads, &RecurrenceBackwardPass::unit);
    if (apart_ && status == Status::ok) {
      status = each(*this, p_, run, p_.sequences * p_.key_heads, &RecurrenceBackwardPass::gather_unit);
    }
    return status;
  }

 private:
  void unit(int64_t unit, Scratch& s, Worker& worker) {
    const Lane lane(p_, chunks_, unit);
    const int64_t width = Lane::width(p_), rows = p_.key_dim;
    const T* const after = data_.grad_after ? static_cast<const T*>(data_.grad_after) + lane.state(p_) : nullptr;
    for (int64_t column = 0; column < p_.value_dim; column += PART) {
      load_columns(after ? after + column : nullptr, width, rows, columns_from(column), state_of(column, s),
                   s.reverse.columns);
    }
    for (int64_t i = 0; i < s.chunk.wide; ++i) {
      s.grad_norm[i] = p_.normalize && after && i < rows ? after[i * width + p_.value_dim] : 0;
    }
    for (int64_t chunk = lane.chunks() - 1; chunk >= 0 && !worker.stopped(); --chunk) gradients(lane, chunk, s);
    if (data_.grad_before) give_state(static_cast<T*>(data_.grad_before) + lane.state(p_), s);
  }

  int64_t columns_from(int64_t column) const { return least(PART, p_.value_dim - column); }
  static T* state_of(int64_t column, const Scratch& s) { return s.reverse.grad_states + column / PART * s.reverse.area; }

  void give_state(T* to, const Scratch& s) const {
    const int64_t width = Lane::width(p_);
    for (int64_t i = 0; i < p_.key_dim; ++i, to += width) {
      for (int64_t c = 0; c < p_.value_dim; ++c) to[c] = state_of(c, s)[i * s.reverse.columns + c % PART];
      if (p_.normalize) to[p_.value_dim] = s.grad_norm[i];
    }
  }

  // All gradients of the tokens of a chunk, and that of the state before it.
  void gradients(const Lane& lane, int64_t chunk, Scratch& s) {
    const Flushing flushing;
    const int64_t width = Lane::width(p_), tokens = lane.tokens(chunk);
    const T* const kept = static_cast<const T*>(data_.checkpoints) + (lane.checkpoint + chunk) * p_.key_dim * width;
    for (int64_t i = 0; i < s.chunk.wide && p_.normalize; ++i) {
      s.chunk.norm[i] = i < p_.key_dim ? kept[i * width + p_.value_dim] : 0;
    }
    prepare_chunk<T, DELTA, GATED>(p_, data_, lane, chunk, s.chunk);
    const T* const by = factors(lane, chunk, s);
    for (int64_t column = 0; column < p_.value_dim; column += PART) {
      columns(lane, chunk, column, kept, by, s);
      s.whole.add(s.reverse, tokens, column == 0);
    }
    for (int64_t n = blocks_of(tokens, BLOCK) - 1; n >= 0; --n) {
      const Normaliser<T> norm{s.chunk.norms + n * s.chunk.wide, s.grad_denominator + n * BLOCK, s.grad_norm};
      block_gradients<T, DELTA, GATED>(p_, n, s, p_.normalize ? &norm : nullptr);
    }
    give(lane, chunk, {data_.query, p_.query}, query(), s.query, s);
    give(lane, chunk, {data_.key, p_.key}, key(), s.key, s);
    if (GATED && data_.grad_gate) give_gate(lane, chunk, s);
    if (DELTA && data_.grad_beta) give_beta(lane, chunk, s);
  }

  // What a part of the columns gives, and the gradient of its values.
  void columns(const Lane& lane, int64_t chunk, int64_t column, const T* kept, const T* by, Scratch& s) {
    ReverseScratch<T>& back = s.reverse;
    const int64_t count = columns_from(column), tokens = lane.tokens(chunk);
    back.grad_state = state_of(column, s);
    load_columns(kept + column, Lane::width(p_), p_.key_dim, count, back.states, back.columns);
    load_tokens(from_column(lane.rows(data_.value, p_.type, p_.value, lane.head, chunk), column), count, s.chunk.ones,
                back.value, back.columns);
    load_tokens(from_column(grad_output(lane, chunk), column), count, by, back.grad_output, back.columns);
    clear_undefined(p_, s.chunk, tokens, back.grad_output, back.columns);
    for (int64_t c = 0; c < back.columns; c += TILE_WIDTH<T>) {
      retrace<T, DELTA, GATED>(s.chunk, back, p_.key_dim, blocks_of(tokens, BLOCK), c);
    }
    reverse<T, DELTA, GATED>(s.chunk, back, p_.key_dim, tokens);
    if (data_.grad_value) {
      store_rows(back.grad_value, back.columns, count, s.chunk.ones,
                 from_column(lane.rows(data_.grad_value, p_.type, data_.grad_value_stride, lane.head, chunk), column));
    }
  }

  Rows grad_output(const Lane& lane, int64_t chunk) const {
    return lane.rows(data_.grad_output, p_.type, data_.grad_output_stride, lane.head, chunk);
  }

  // The factor of each row of the gradient of the output: 1, or 1 over the denominator, whose own gradient is then made.
  const T* factors(const Lane& lane, int64_t chunk, Scratch& s) const {
    if (!p_.normalize) return s.chunk.ones;
    const Rows output = lane.rows(data_.output, p_.output_type, p_.output, lane.head, chunk);
    for (int64_t t = 0; t < CHUNK; ++t) {
      const T denominator = t < output.count ? s.chunk.denominator[t] : 0;
      s.sums[t] = denominator == 0 ? 0 : 1 / denominator;
      s.grad_denominator[t] = 0;
      if (denominator != 0) s.grad_denominator[t] = -product(grad_output(lane, chunk), output, t, s) * s.sums[t];
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
  // The gradient of q or k: the caller's, and the memory of the call where several heads leave theirs first.
  struct Shared {
    void* data;
    Stride stride;
    const Buffer& apart;
  };
  Shared query() const { return {data_.grad_query, data_.grad_query_stride, query_}; }
  Shared key() const { return {data_.grad_key, data_.grad_key_stride, key_}; }

  void give(const Lane& lane, int64_t chunk, const Tensor& raw, const Shared& grad, T* rows, Scratch& s) {
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
    const Lane lane(p_, chunks_, unit / p_.key_heads * p_.heads + key_head * group);
    for (int64_t chunk = 0; chunk < lane.chunks() && !worker.stopped(); ++chunk) {
      if (data_.grad_query) gather(lane, chunk, query(), s);
      if (data_.grad_key) gather(lane, chunk, key(), s);
    }
  }

  void gather(const Lane& lane, int64_t chunk, const Shared& grad, Scratch& s) {
    const Flushing flushing;
    T* const sum = s.query;
    load_rows(own(grad.apart, lane, lane.head, chunk), p_.key_dim, s.chunk.ones, sum, s.chunk.wide);
    for (int64_t h = 1; h < p_.heads / p_.key_heads; ++h) add_rows(own(grad.apart, lane, lane.head + h, chunk), sum, s);
    store_rows(sum, s.chunk.wide, p_.key_dim, s.chunk.ones,
               lane.rows(grad.data, p_.type, grad.stride, lane.key_head, chunk));
  }

  void give_gate(const Lane& lane, int64_t chunk, const Scratch& s) {
    const bool alike = p_.gates == Gates::scalar;
    const int64_t width = alike ? 1 : p_.key_dim;
    T* to = static_cast<T*>(data_.grad_gate) + (lane.batch * p_.heads + lane.head) * tokens_ * width +
            (lane.first + chunk * CHUNK) * width;
    for (int64_t t = 0; t < lane.tokens(chunk); ++t, to += width) {
      const T* row = s.gate + t * s.chunk.wide;
      if (alike) {
        F<T> sum = {};
        for (int64_t i = 0; i < s.chunk.wide; i += LANES<T>) sum += load(row + i);
        *to = total(sum);
      } else {
        for (int64_t i = 0; i < width; ++i) to[i] = row[i];
      }
    }
  }

  void give_beta(const Lane& lane, int64_t chunk, const Scratch& s) {
    T* to = static_cast<T*>(data_.grad_beta) + (lane.batch * p_.heads + lane.head) * tokens_ + lane.first + chunk * CHUNK;
    for (int64_t t = 0; t < lane.tokens(chunk); ++t) {
      to[t] = s.whole.inner[t / BLOCK * BLOCK * BLOCK + t % BLOCK * (BLOCK + 1)];
    }
  }

  const Recurrence& p_;
  const RecurrenceBackward& data_;
  ChunkCounts chunks_;
  int64_t tokens_ = 0;
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
