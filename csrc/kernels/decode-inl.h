// The forward pass of few queries against many keys: what reads keys and values from memory once and is done.
//
// The queries of all heads that read the same keys stand in the lanes together. Their keys are split into chunks of a
// fixed size, whose states are merged in their order, whatever the threads: so bits do not depend on these.
// Source: Dao et al., "Flash-Decoding for long-context inference" (2023).
#pragma once

#include "dots-inl.h"
#include "forward_plain-inl.h"

namespace {

constexpr int64_t DECODED = 8;  // queries at most
constexpr int64_t SPLIT = 16;   // key blocks of a chunk
constexpr int64_t STEP = 8;     // keys between requests for what follows

// Whether a call is of this kind: few queries, in their own order.
inline bool decodes(const Problem& p) {
  if (p.queries > DECODED) return false;
  for (int64_t m = 0; m < p.plan.count; ++m) {
    const qkv::Member& member = p.plan.members[m];
    for (int64_t i = 0; i < member.count; ++i) {
      if (member.parts[i].query_rows) return false;
    }
  }
  return true;
}

template <class T>
struct DecodeScratch : ForwardScratch<T> {
  T *all_biases, *all_kept;  // of all heads, (TILE, width)

  DecodeScratch(const Problem& p, Arena& arena) : ForwardScratch<T>(p, arena) {
    all_biases = arena.take<T>(TILE * TILE);
    all_kept = arena.take<T>(TILE * TILE);
  }
};

template <class T>
class DecodePass {
 public:
  DecodePass(const Problem& problem, const Forward& data) : p_(problem), data_(data) {
    const qkv::Plan& plan = problem.plan;
    const int64_t group = p_.heads / most(p_.kv_heads, 1), most_lanes = TILE / most(p_.queries, 1);
    together_ = plan.index_head_stride == 0 ? most(1, least(group, most_lanes)) : 1;
    sets_ = blocks_of(group, together_);
    for (int64_t m = 0; m < plan.count; ++m) {
      chunks_ = most(chunks_, each_chunk(plan.members[m], [](const Chunk&, int64_t) {}));
    }
  }

  Status run(const Run& run) {
    const int64_t units = p_.batch * p_.kv_heads * sets_;
    if (!list_chunks()) return Status::out_of_memory;
    if (chunks_ > 1 && !states_.reserve(units * chunks_ * state_size() * sizeof(T))) return Status::out_of_memory;
    const Status status = each(*this, p_, run, units * chunks_, &DecodePass::chunk_unit);
    if (status != Status::ok || chunks_ == 1) return status;
    return each(*this, p_, run, units, &DecodePass::merge_unit);
  }

 private:
  // Some heads of a batch row that read one key head.
  struct Heads {
    int64_t b, first, count, queries;

    int64_t lanes() const { return count * queries; }
  };

  // Key blocks first to first + SPLIT of a part, some of which are seen.
  struct Chunk {
    const Part* part;  // null: no more
    int64_t first;
  };

  // take(chunk, i) for all of a member, in order; how many there are.
  template <class Take>
  static int64_t each_chunk(const qkv::Member& member, Take take) {
    int64_t count = 0;
    for (int64_t i = 0; i < member.count; ++i) {
      const Part& part = member.parts[i];
      if (part.schedule.rows == 0) continue;
      for (int64_t next = 0;;) {
        const int64_t block = Cursor(part.schedule, 0, {next, NO_BLOCK}).block();
        if (block == NO_BLOCK) break;
        take(Chunk{&part, block - block % SPLIT}, count++);
        next = block - block % SPLIT + SPLIT;
      }
    }
    return count;
  }

  bool list_chunks() {
    const qkv::Plan& plan = p_.plan;
    if (!list_.reserve(plan.count * chunks_ * sizeof(Chunk))) return false;
    for (int64_t m = 0; m < plan.count; ++m) {
      Chunk* const list = static_cast<Chunk*>(list_.data()) + m * chunks_;
      const int64_t count = each_chunk(plan.members[m], [&](const Chunk& chunk, int64_t i) { list[i] = chunk; });
      for (int64_t i = count; i < chunks_; ++i) list[i] = {nullptr, 0};
    }
    return true;
  }
  const Chunk& chunk_of(const Heads& heads, int64_t i) const {
    const qkv::Member& member = member_of(p_, heads.b, heads.first);
    return static_cast<const Chunk*>(list_.data())[(&member - p_.plan.members) * chunks_ + i];
  }

  Heads heads_of(int64_t unit) const {
    const int64_t group = p_.heads / p_.kv_heads, set = unit % sets_, g = unit / sets_ % p_.kv_heads;
    const int64_t b = unit / sets_ / p_.kv_heads, first = set * together_;
    const Range queries = queries_of(p_, b);
    return {b, g * group + first, least(together_, group - first), queries.stop - queries.first};
  }

  // One chunk of keys of one unit: its state is put away, or finished where it is the only one.
  void chunk_unit(int64_t unit, DecodeScratch<T>& scratch, Worker& worker) {
    const Heads heads = heads_of(unit / chunks_);
    if (!heads.lanes()) return;
    const Chunk& chunk = chunk_of(heads, unit % chunks_);
    if (!chunk.part && chunks_ > 1) return;
    Online<T>& one = scratch.tiles[0];
    one.count = heads.lanes();
    one.width = padded<T>(one.count);
    start(one);
    if (chunk.part) {
      const Scene<T> scene{p_, *chunk.part, heads.b, heads.first};
      attend(scene, heads, {chunk.first, chunk.first + SPLIT}, one, scratch, worker);
    }
    chunks_ > 1 ? keep(unit, one) : finish_heads(heads, one, scratch);
  }

  void start(Online<T>& one) const {
    const int64_t size = one.count * padded<T>(p_.value_dim);
    for (int64_t i = 0; i < size; i += LANES<T>) store(one.output + i, F<T>{});
    for (int64_t i = 0; i < TILE; ++i) one.top[i] = -INFINITE<T>, one.total[i] = one.exact[i] = one.energy[i] = 0;
  }

  void attend(const Scene<T>& scene, const Heads& heads, Range blocks, Online<T>& one, DecodeScratch<T>& scratch,
              Worker& worker) {
    one.cursor = Cursor(scene.part.schedule, 0, blocks);
    if (one.cursor.block() == NO_BLOCK) return;
    load_queries(scene, heads, one, scratch);
    walk<false>(scene, heads, one, scratch, worker);
    const int64_t size = one.count * padded<T>(p_.value_dim);
    if (finite(one.output, 0, 1, size)) return;
    start(one);
    one.cursor = Cursor(scene.part.schedule, 0, blocks);
    walk<true>(scene, heads, one, scratch, worker);
  }

  // By rows, scaled, zeros up to whole vectors and to a power of two.
  void load_queries(const Scene<T>& scene, const Heads& heads, Online<T>& one, DecodeScratch<T>& scratch) {
    const int64_t wide = padded<T>(p_.head_dim);
    for (int64_t i = 0; i < heads.count; ++i) {
      const Scene<T> head{p_, scene.part, heads.b, heads.first + i};
      const Rows rows = head.query_rows(head.query_side(data_.query, p_.type, p_.query_stride), 0);
      load_rows(rows, p_.head_dim, scratch.scales, one.query + i * heads.queries * wide, wide);
    }
    for (int64_t i = one.count * wide; i < dot_rows<T>(one.count) * wide; i += LANES<T>) store(one.query + i, F<T>{});
  }

  template <bool CAREFUL>
  void walk(const Scene<T>& scene, const Heads& heads, Online<T>& one, DecodeScratch<T>& scratch, Worker& worker) {
    const Matrix keys = scene.key_side(data_.key, p_.key_stride), values = scene.key_side(data_.value, p_.value_stride);
    for (; one.cursor.block() != NO_BLOCK && !worker.stopped(); one.cursor.next()) {
      const int64_t block = one.cursor.block();
      const Rows key_rows = scene.kept_rows(keys, block);
      uint64_t mask[TILE];
      const Share all{{0, one.width}, {0, key_rows.count}};
      const bool masked = one.cursor.mask();
      if (masked) spread(one.cursor.mask(), heads, mask);
      const TileBias<T> bias = prepare(scene, heads, block, key_rows.count, one, scratch);
      const Shape<T> shape{one.width, all, masked ? mask : nullptr, bias, static_cast<T>(p_.softcap * LOG2_E)};
      const Rows value_rows = scene.kept_rows(values, block);
      score(key_rows, value_rows, one, scratch);
      shape_scores(shape, scratch.scores, static_cast<T*>(nullptr), scratch.peak);
      if (CAREFUL) look_again(shape, scratch);
      const T* kept = p_.dropout_threshold ? scratch.all_kept : nullptr;
      const Weighing<T> at{p_, shape, one, scratch, kept, true, data_.entropy != nullptr};
      for (int64_t lane = 0; lane < one.width; lane += LANES<T>) PlainForward<T>::weigh(at, lane);
      gather<CAREFUL>(value_rows, scene.kept_rows(keys, next_of(one.cursor)), one, scratch);
    }
  }

  // The block that the cursor goes to.
  static int64_t next_of(Cursor cursor) {
    const int64_t block = cursor.block();
    cursor.next();
    return cursor.block() == NO_BLOCK ? block : cursor.block();
  }

  static void look_again(const Shape<T>& shape, DecodeScratch<T>& scratch) {
    hide_carefully(shape, scratch.scores, scratch.seen);
    for (int64_t lane = 0; lane < shape.width; lane += LANES<T>) {
      store(scratch.peak + lane, peak_of_column(shape, scratch.scores, lane));
    }
  }

  // The mask of one head's queries for all heads.
  static void spread(const uint64_t* from, const Heads& heads, uint64_t* mask) {
    uint64_t each = 0;
    for (int64_t i = 0; i < heads.count; ++i) each |= uint64_t{1} << (i * heads.queries);
    const uint64_t word = (uint64_t{1} << heads.queries) - 1;
    for (int64_t k = 0; k < TILE; ++k) mask[k] = (from[k] & word) * each;
  }

  // Biases and what dropout keeps, head by head, side by side in the lanes.
  TileBias<T> prepare(const Scene<T>& scene, const Heads& heads, int64_t block, int64_t keys, Online<T>& one,
                      DecodeScratch<T>& scratch) {
    if (!p_.dropout_threshold && p_.bias.kind == BiasKind::none) return {};
    Online<T>& alone = scratch.tiles[1];
    alone.tile = 0, alone.count = heads.queries, alone.width = padded<T>(heads.queries);
    for (int64_t i = 0; i < heads.count; ++i) {
      const Scene<T> head{p_, scene.part, heads.b, heads.first + i};
      const TileBias<T> bias = prepare_tile(head, data_.bias, data_.seed, alone, block, keys, scratch);
      for (int64_t k = 0; k < keys; ++k) {
        for (int64_t t = 0; t < heads.queries; ++t) {
          const int64_t to = k * one.width + i * heads.queries + t;
          if (bias.at) scratch.all_biases[to] = bias.at[k * bias.stride + t];
          if (p_.dropout_threshold) scratch.all_kept[to] = scratch.kept[k * alone.width + t];
        }
      }
    }
    return {p_.bias.kind == BiasKind::none ? nullptr : scratch.all_biases, one.width};
  }

  // Rows that are read in place: each dense and in whole vectors.
  static bool direct(const Rows& rows, int64_t width) {
    return rows.column_stride == 1 && !rows.slots && width % LANES<T> == 0;
  }

  // The memory works while the core does only where it is asked in time and evenly: beside the keys of a block its values
  // are asked for, beside these the keys of the next.
  void score(const Rows& keys, const Rows& values, Online<T>& one, DecodeScratch<T>& scratch) const {
    const int64_t wide = padded<T>(p_.head_dim), rows = dot_rows<T>(one.count);
    if (!direct(keys, p_.head_dim)) {
      load_rows(keys, p_.head_dim, scratch.ones, scratch.keys, wide);
      const T* const copy = scratch.keys;
      const auto row = [&](int64_t k) { return copy + k * wide; };
      return dots<T, T>(row, [](int64_t) {}, keys.count, one.query, rows, wide, scratch.scores, one.width);
    }
    with_stored<T>(keys.type, [&](auto stored) {
      using E = decltype(stored);
      const bool even = keys.even();  // then no row has to be looked up
      const E* const first = keys.at<E>(0);
      const auto row = [&](int64_t k) { return even ? first + k * keys.row_stride : keys.at<E>(k); };
      const char* const value = reinterpret_cast<const char*>(values.at<E>(0));
      const int64_t step = values.row_stride * sizeof(E), bytes = p_.value_dim * sizeof(E);
      const auto fetch = [&](int64_t k) __attribute__((always_inline)) { ask_for(value + k * step, step, 1, bytes); };
      dots<T, E>(row, fetch, keys.count, one.query, rows, wide, scratch.scores, one.width);
    });
  }

  template <bool CAREFUL>
  void gather(const Rows& values, const Rows& next_keys, Online<T>& one, DecodeScratch<T>& scratch) const {
    const int64_t wide = padded<T>(p_.value_dim), width = one.width;
    if (CAREFUL || !direct(values, p_.value_dim) || !values.even()) {
      load_rows(values, p_.value_dim, scratch.ones, scratch.values, wide);
      const Product<T> product{Start::decay, scratch.decay, scratch.scores, width, scratch.values, wide, one.output, wide};
      return multiply_as<T, Order::columns, CAREFUL>(product, one.count, wide, values.count, {scratch.seen, 0});
    }
    with_stored<T>(values.type, [&](auto stored) {
      using E = decltype(stored);
      for (int64_t k = 0; k < values.count; k += STEP) {
        ask_for(next_keys, k, STEP, p_.head_dim);
        const Start from = k ? Start::keep : Start::decay;
        multiply<Stored<T, E>, Order::columns>({from, scratch.decay, scratch.scores + k * width, width,
                                                values.at<E>(0) + k * values.row_stride, values.row_stride, one.output, wide},
                                               one.count, wide, least(STEP, values.count - k));
      }
    });
  }

  // A state between chunks: the sums, then the outputs.
  int64_t state_size() const { return TILE * 3 + together_ * p_.queries * padded<T>(p_.value_dim); }
  T* state(int64_t chunk_unit) const { return static_cast<T*>(states_.data()) + chunk_unit * state_size(); }

  void keep(int64_t unit, const Online<T>& one) const {
    T* const to = state(unit);
    for (int64_t i = 0; i < TILE; ++i) to[i] = one.top[i], to[TILE + i] = one.total[i], to[2 * TILE + i] = one.energy[i];
    const int64_t size = one.count * padded<T>(p_.value_dim);
    for (int64_t i = 0; i < size; i += LANES<T>) store(to + 3 * TILE + i, load(one.output + i));
  }

  void merge_unit(int64_t unit, DecodeScratch<T>& scratch, Worker&) {
    const Heads heads = heads_of(unit);
    if (!heads.lanes()) return;
    Online<T>& one = scratch.tiles[0];
    one.count = heads.lanes();
    one.width = padded<T>(one.count);
    start(one);
    for (int64_t i = 0; i < chunks_ && chunk_of(heads, i).part; ++i) merge(state(unit * chunks_ + i), one, scratch);
    finish_heads(heads, one, scratch);
  }

  void merge(const T* from, Online<T>& one, DecodeScratch<T>& scratch) const {
    const int64_t wide = padded<T>(p_.value_dim);
    for (int64_t lane = 0; lane < one.width; lane += LANES<T>) {
      const F<T> before = load(one.top + lane), there = load(from + lane), top = greater<T>(before, there);
      const F<T> shift = top == -INFINITE<T> ? F<T>{} : top, down = exp2<T>(before - shift), up = exp2<T>(there - shift);
      const F<T> total = load(one.total + lane) * down + load(from + TILE + lane) * up;
      store(one.top + lane, top);
      store(one.total + lane, total);
      store(one.exact + lane, total);
      store(one.energy + lane, load(one.energy + lane) * down + load(from + 2 * TILE + lane) * up);
      store(scratch.decay + lane, down);
      store(scratch.peak + lane, up);
    }
    for (int64_t i = 0; i < one.count; ++i) {
      T* const to = one.output + i * wide;
      const T* const more = from + 3 * TILE + i * wide;
      for (int64_t c = 0; c < wide; c += LANES<T>) {
        store(to + c, load(to + c) * scratch.decay[i] + load(more + c) * scratch.peak[i]);
      }
    }
  }

  void finish_heads(const Heads& heads, const Online<T>& one, DecodeScratch<T>& scratch) const {
    const int64_t wide = padded<T>(p_.value_dim);
    for (int64_t i = 0; i < heads.count; ++i) {
      const int64_t lane = i * heads.queries, first = first_row(p_, heads.b, heads.first + i);
      Online<T> head = one;
      head.top += lane, head.total += lane, head.exact += lane, head.energy += lane;
      const Matrix output = output_of(p_, data_, first);
      const Rows rows{output.data, output.type, output.row_stride, 1, nullptr, 0, heads.queries};
      finish(p_, data_, rows, first, heads.first + i, head, one.output + lane * wide, scratch.decay);
    }
  }

  const Problem& p_;
  Forward data_;
  Buffer list_, states_;
  int64_t together_ = 1, sets_ = 1, chunks_ = 1;
};

}  // namespace
