// The linear family, forward: each unit takes some columns of one head through all tokens of one sequence.
#pragma once

#include "columns-inl.h"
#include "step-inl.h"

namespace {

using qkv::RecurrenceForward;

template <class T>
struct RecurrenceScratch {
  ChunkScratch<T> chunk;
  int64_t columns;  // of a part, in whole tiles
  T *state;         // (parts, tiles, D, TILE_WIDTH)
  T *value, *output;  // (CHUNK, columns)
  T *factors;         // (CHUNK): 1 over the denominator

  RecurrenceScratch(const Recurrence& p, Arena& arena) : chunk(p, arena) {
    const int64_t part = least(PART, p.value_dim);
    columns = blocks_of(part, TILE_WIDTH<T>) * TILE_WIDTH<T>;
    const int64_t steps = STEP_WIDEST / 2 * LANES<T>;  // columns of single tokens that need a copy
    state = arena.take<T>(p.key_dim * most(columns * blocks_of(p.value_dim, PART), steps));
    value = arena.take<T>(CHUNK * columns);
    output = arena.take<T>(CHUNK * columns);
    factors = arena.take<T>(CHUNK);
  }
  void prepare(const Recurrence& p) { chunk.prepare(p); }
};

// Rows of a state (D, W), from a column on, as a part's tiles keep them, and back. Null: zeros.
template <class T>
inline void load_state(const T* from, int64_t width, int64_t rows, int64_t columns, T* tiles) {
  for (int64_t c = 0; c < columns; c += TILE_WIDTH<T>) {
    const int64_t some = least(TILE_WIDTH<T>, columns - c);
    for (int64_t i = 0; i < rows; ++i, tiles += TILE_WIDTH<T>) {
      for (int64_t j = 0; j < TILE_WIDTH<T>; ++j) tiles[j] = from && j < some ? from[i * width + c + j] : 0;
    }
  }
}

template <class T>
inline void store_state(const T* tiles, int64_t width, int64_t rows, int64_t columns, T* to) {
  for (int64_t c = 0; c < columns; c += TILE_WIDTH<T>) {
    const int64_t some = least(TILE_WIDTH<T>, columns - c);
    for (int64_t i = 0; i < rows; ++i, tiles += TILE_WIDTH<T>) {
      for (int64_t j = 0; j < some; ++j) to[i * width + c + j] = tiles[j];
    }
  }
}

// Some columns of a state (D, W), zeros beyond them. Null: zeros.
template <class T>
inline void load_columns(const T* from, int64_t width, int64_t rows, int64_t count, T* to, int64_t to_stride) {
  for (int64_t i = 0; i < rows; ++i, to += to_stride) {
    for (int64_t c = 0; c < to_stride; ++c) to[c] = from && c < count ? from[i * width + c] : 0;
  }
}

template <class T, bool DELTA, bool GATED>
class RecurrencePass {
 public:
  RecurrencePass(const Recurrence& problem, const RecurrenceForward& data) : p_(problem), data_(data) {}

  Status run(const Run& run) {
    const int64_t lanes = p_.sequences * p_.heads;
    parts_ = most(1, blocks_of(p_.value_dim, PART));
    const bool shared = p_.normalize && data_.before == data_.after;  // the column that all parts read and one writes
    if (!chunks_.count(p_)) return Status::out_of_memory;
    together_ = shared || lanes >= 2 * run.threads ? parts_ : 1;
    return each(*this, p_, run, lanes * blocks_of(parts_, together_), &RecurrencePass::unit);
  }

 private:
  void unit(int64_t unit, RecurrenceScratch<T>& scratch, Worker& worker) {
    const int64_t per_lane = blocks_of(parts_, together_);
    const Lane lane(p_, chunks_, unit / per_lane);
    const int64_t first = unit % per_lane * together_, stop = least(parts_, first + together_);
    if (lane.count > FEW) {
      walk(lane, first, stop, scratch, worker);
    } else {
      few(lane, first * PART, least(stop * PART, p_.value_dim), scratch);
    }
  }

  // All tokens meet the columns of some parts.
  void walk(const Lane& lane, int64_t first, int64_t stop, RecurrenceScratch<T>& s, Worker& worker) {
    const int64_t width = Lane::width(p_), size = p_.key_dim * width;
    const T* const before = begin(lane, s);
    for (int64_t part = first; part < stop; ++part) {
      const int64_t column = part * PART, count = least(PART, p_.value_dim - column);
      load_state(before ? before + column : nullptr, width, p_.key_dim, count, state(part, s));
    }
    for (int64_t chunk = 0; chunk < lane.chunks() && !worker.stopped(); ++chunk) {
      const Flushing flushing;
      T* const kept = data_.checkpoints ? static_cast<T*>(data_.checkpoints) + (lane.checkpoint + chunk) * size : nullptr;
      for (int64_t part = first; part < stop && kept; ++part) keep(kept, part, s);
      prepare_chunk<T, DELTA, GATED>(p_, data_, lane, chunk, s.chunk);
      for (int64_t part = first; part < stop; ++part) columns(lane, chunk, part, part == first, s);
    }
    for (int64_t part = first; part < stop; ++part) keep(static_cast<T*>(data_.after) + lane.state(p_), part, s);
  }

  T* state(int64_t part, const RecurrenceScratch<T>& s) const { return s.state + part * p_.key_dim * s.columns; }

  // The tokens of a chunk meet the columns of a part; those of the next are asked for.
  void columns(const Lane& lane, int64_t chunk, int64_t part, bool asks, RecurrenceScratch<T>& s) {
    const int64_t column = part * PART, count = least(PART, p_.value_dim - column), rows = p_.key_dim;
    const Rows value = from_column(lane.rows(data_.value, p_.type, p_.value, lane.head, chunk), column);
    load_tokens(value, count, s.chunk.ones, s.value, s.columns);
    const Ahead ahead = next_chunk(p_, data_, lane, chunk);
    T* tile = state(part, s);
    for (int64_t c = 0; c < count; c += TILE_WIDTH<T>, tile += rows * TILE_WIDTH<T>) {
      meet<T, DELTA, GATED>(s.chunk, rows, value.count, tile, TILE_WIDTH<T>, s.value + c, s.output + c, s.columns,
                            asks && c == 0 ? &ahead : nullptr);
    }
    give(lane, chunk, column, factors(value.count, 1, s), s);
  }

  // The few tokens of a short sequence, one by one, with some columns of the state where they lie.
  void few(const Lane& lane, int64_t first, int64_t stop, RecurrenceScratch<T>& s) {
    const Flushing flushing;
    const int64_t size = p_.key_dim * Lane::width(p_);
    T* const after = static_cast<T*>(data_.after) + lane.state(p_);
    const T* before = begin(lane, s);
    if (!before || lane.count == 0) {
      copy_columns(before, first, stop - first, after);
      before = after;
    }
    if (lane.count > 0) {
      T* const kept = data_.checkpoints ? static_cast<T*>(data_.checkpoints) + lane.checkpoint * size : nullptr;
      if (kept) copy_columns(before, first, stop - first, kept), keep_norm(kept, first, s);
      load_chunk<T, DELTA, GATED>(p_, data_, lane, 0, s.chunk);
      prepare_asks<T, GATED>(lane.count, s.chunk);
      if (p_.normalize) step_norm<T, GATED>(lane.count, s.chunk);
      const T* const by = factors(lane.count, static_cast<T>(p_.scale), s);
      constexpr int64_t WIDEST = STEP_WIDEST * LANES<T>, HALF = WIDEST / 2;
      int64_t column = first;
      for (; stop - column >= WIDEST; column += WIDEST) steps<STEP_WIDEST>(lane, column, WIDEST, before, after, by, s);
      for (; column < stop; column += HALF) {
        steps<STEP_WIDEST / 2>(lane, column, least(HALF, stop - column), before, after, by, s);
      }
    }
    keep_norm(after, first, s);
  }

  // All tokens with `some` columns, up to N vectors of them; fewer, by way of scratch.
  template <int N>
  void steps(const Lane& lane, int64_t column, int64_t some, const T* before, T* after, const T* by,
             RecurrenceScratch<T>& s) const {
    constexpr int64_t FULL = N * LANES<T>;
    const int64_t width = Lane::width(p_);
    load_tokens(from_column(lane.rows(data_.value, p_.type, p_.value, lane.head, 0), column), some, s.chunk.ones, s.value, FULL);
    const T* state = before + column;
    T* to = after + column;
    if (some < FULL) {
      load_columns(state, width, p_.key_dim, some, s.state, FULL);
      state = to = s.state;
    }
    const int64_t stride = some < FULL ? FULL : width;
    for (int64_t t = 0; t < lane.count; ++t) {
      step<T, N, DELTA, GATED>(s.chunk, t, s.chunk.erases + t * s.chunk.wide, p_.key_dim, t == 0 ? state : to, to, stride,
                               s.value + t * FULL, s.output + t * FULL);
    }
    for (int64_t i = 0; i < p_.key_dim && some < FULL; ++i) copy(s.state + i * FULL, some, after + i * width + column);
    clear_undefined(p_, s.chunk, lane.count, s.output, FULL);
    store_rows(s.output, FULL, some, by, from_column(lane.rows(data_.output, p_.output_type, p_.output, lane.head, 0), column));
  }

  // The state before the first token, null for zeros; its column of the normaliser is loaded.
  const T* begin(const Lane& lane, RecurrenceScratch<T>& s) const {
    const T* const before = data_.before ? static_cast<const T*>(data_.before) + lane.state(p_) : nullptr;
    if (!p_.normalize) return before;
    const int64_t width = Lane::width(p_);
    for (int64_t i = 0; i < s.chunk.wide; ++i) {
      s.chunk.norm[i] = before && i < p_.key_dim ? before[i * width + p_.value_dim] : 0;
    }
    return before;
  }

  static void copy(const T* from, int64_t count, T* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = from[i];
  }
  void copy_columns(const T* from, int64_t column, int64_t count, T* to) const {
    const int64_t width = Lane::width(p_);
    for (int64_t i = column; i < p_.key_dim * width; i += width) {
      for (int64_t c = i; c < i + count && from != to; ++c) to[c] = from ? from[c] : 0;
    }
  }

  // Rows of the output of a chunk.
  void give(const Lane& lane, int64_t chunk, int64_t column, const T* factors, const RecurrenceScratch<T>& s) const {
    const int64_t count = least(PART, p_.value_dim - column);
    clear_undefined(p_, s.chunk, lane.tokens(chunk), s.output, s.columns);
    const Rows output = from_column(lane.rows(data_.output, p_.output_type, p_.output, lane.head, chunk), column);
    store_rows(s.output, s.columns, count, factors, output);
  }

  // The factor of each row of the output: `factor`, or 1 over the denominator, and 0 where that is 0.
  const T* factors(int64_t count, T factor, RecurrenceScratch<T>& s) const {
    if (!p_.normalize && factor == 1) return s.chunk.ones;
    for (int64_t t = 0; t < count; ++t) {
      if (!p_.normalize) {
        s.factors[t] = factor;
        continue;
      }
      const T denominator = s.chunk.denominator[t];
      s.factors[t] = denominator == 0 ? 0 : 1 / denominator;
    }
    return s.factors;
  }

  // The state as it is now, the columns of a part.
  void keep(T* to, int64_t part, const RecurrenceScratch<T>& s) const {
    const int64_t column = part * PART, count = least(PART, p_.value_dim - column);
    store_state(state(part, s), Lane::width(p_), p_.key_dim, count, to + column);
    keep_norm(to, column, s);
  }

  void keep_norm(T* to, int64_t column, const RecurrenceScratch<T>& s) const {
    const int64_t width = Lane::width(p_);
    if (!p_.normalize || column != 0) return;
    for (int64_t i = 0; i < p_.key_dim; ++i) to[i * width + p_.value_dim] = s.chunk.norm[i];
  }

  const Recurrence& p_;
  const RecurrenceForward& data_;
  ChunkCounts chunks_;
  int64_t parts_ = 1, together_ = 1;
};

template <class T>
Status recur_as(const Recurrence& problem, const RecurrenceForward& data, const Run& run) {
  const bool gated = problem.gates != Gates::none;
  if (problem.delta) {
    return gated ? RecurrencePass<T, true, true>(problem, data).run(run)
                 : RecurrencePass<T, true, false>(problem, data).run(run);
  }
  return gated ? RecurrencePass<T, false, true>(problem, data).run(run)
               : RecurrencePass<T, false, false>(problem, data).run(run);
}

inline Status run_recurrence(const Recurrence& problem, const RecurrenceForward& data, const Run& run) {
  return problem.type == Type::float64 ? recur_as<double>(problem, data, run) : recur_as<float>(problem, data, run);
}

}  // namespace
