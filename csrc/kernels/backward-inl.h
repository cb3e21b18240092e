// The backward pass: which units of work make which gradients.
//
// Every number of a gradient is one chain of additions in a fixed order: query heads of a group, parts, batch rows where
// they share it, query tiles, key blocks. Whether one thread makes all gradients of a head in one pass over its tiles,
// or several make those of keys in one stage and those of queries in another, the chains are the same, and so the bits.
#pragma once

#include "backward_tile-inl.h"

namespace {

constexpr int64_t KEY_RUN = 8;  // key blocks that one unit of a stage owns

// What runs now: which gradients, and of how many pieces of each head (0: all of it at once), of which head and part.
struct Stage {
  int wanted;
  int64_t split, head, part;
};

template <class T>
void clear(void* data, int64_t first, int64_t count) {
  T* to = static_cast<T*>(data) + first;
  for (int64_t i = 0; i < count; ++i) to[i] = 0;
}

template <class Unit>
class BackwardPass {
  using T = typename Unit::Number;

 public:
  BackwardPass(const Problem& problem, const Backward& data)
      : p_(problem), data_(data), given_(data), size_(problem.plan), bias_(problem, data, size_.tiles) {}

  Status run(const Run& run) {
    const int64_t heads = p_.batch * p_.heads, rows = all_rows(p_), tiles = blocks_of(p_.queries, TILE);
    if (!make_room() || !deltas_.reserve(rows * sizeof(T)) || !slices_.reserve(slices() * sizeof(T)) ||
        !sinks_.reserve(data_.grad_sinks ? heads * tiles * sizeof(T) : 0)) {
      return Status::out_of_memory;
    }
    bias_.sums = static_cast<T*>(slices_.data());
    tiles_.deltas = static_cast<T*>(deltas_.data());
    Status status = each(*this, p_, run, heads * tiles, &BackwardPass::prepare_unit);
    if (status == Status::ok) status = make(run);
    if (status == Status::ok) status = each(*this, p_, run, heads, &BackwardPass::look_unit);
    if (status == Status::ok && !__atomic_load_n(&finite_, __ATOMIC_RELAXED)) {
      tiles_.careful = true;
      status = make(run);
    }
    if (status == Status::ok && wide_.data()) status = each(*this, p_, run, heads, &BackwardPass::round_unit);
    if (status != Status::ok) return status;
    reduce_slices();
    reduce_sinks();
    return Status::ok;
  }

 private:
  // Gradients grow in the computing type: where the caller's cannot hold them, in memory of their own.
  bool make_room() {
    if (p_.type == TypeOf<T>::VALUE) return true;
    const int64_t query = data_.grad_query ? all_rows(p_) * p_.head_dim : 0;
    const int64_t key = data_.grad_key ? all_key_rows(p_) * p_.head_dim : 0;
    const int64_t value = data_.grad_value ? all_key_rows(p_) * p_.value_dim : 0;
    if (!wide_.reserve((query + key + value) * sizeof(T))) return false;
    T* const own = static_cast<T*>(wide_.data());
    if (query) data_.grad_query = own;
    if (key) data_.grad_key = own + query;
    if (value) data_.grad_value = own + query + key;
    return true;
  }

  int64_t slices() const { return bias_.chunks * bias_.slice * p_.batch * p_.heads; }
  int64_t bias_size() const { return p_.bias.size[0] * p_.bias.size[1] * p_.bias.size[2] * p_.bias.size[3]; }
  int64_t group() const { return p_.heads / p_.kv_heads; }

  // Rows of dO · O less the gradient of lse, over the total; a sink's share of them.
  void prepare_unit(int64_t unit, BackwardScratch<T>& scratch, Worker&) {
    const int64_t tiles = blocks_of(p_.queries, TILE), head = unit / tiles, first = unit % tiles * TILE;
    const int64_t b = head / p_.heads, h = head % p_.heads, wide = padded<T>(p_.value_dim), at = first_row(p_, b, h);
    const Range queries = queries_of(p_, b);
    const int64_t count = least(TILE, queries.stop - queries.first - first);
    const Type type = p_.output_type;
    const void* const output = static_cast<const char*>(data_.output) + at * p_.value_dim * size_of(type);
    load_rows({output, type, p_.value_dim, 1, nullptr, first, count}, p_.value_dim, scratch.ones, scratch.values, wide);
    const int64_t* const stride = data_.grad_output_stride;
    const Matrix grad = Matrix::of(data_.grad_output, type, stride, b, h, queries, p_.packing.queries);
    load_rows({grad.data, type, grad.row_stride, grad.column_stride, nullptr, first, count}, p_.value_dim, scratch.ones,
              scratch.grad_values, wide);
    T sink_sum = 0;
    for (int64_t i = 0; i < count; ++i) {
      F<T> products{};
      for (int64_t v = 0; v < wide; v += LANES<T>) {
        products += load(scratch.values + i * wide + v) * load(scratch.grad_values + i * wide + v);
      }
      T delta = 0;
      for (int lane = 0; lane < LANES<T>; ++lane) delta += products[lane];
      const int64_t row = at + first + i;
      if (data_.grad_lse) delta -= static_cast<const T*>(data_.grad_lse)[row];
      delta /= static_cast<const T*>(data_.total)[row];
      static_cast<T*>(deltas_.data())[row] = delta;
      if (data_.grad_sinks) {
        const T sink = in_bits(static_cast<const T*>(data_.sinks)[h], T());
        const T weight = exp2<T>(splat<T>(sink - static_cast<const T*>(data_.shift)[row]))[0];
        sink_sum -= weight == 0 ? 0 : weight * delta;
      }
    }
    if (data_.grad_sinks) static_cast<T*>(sinks_.data())[unit] = sink_sum;
  }

  // All gradients of the tensors, by one stage over heads or by stages over keys and over queries.
  Status make(const Run& run) {
    clear<T>(bias_.sums, 0, slices());
    if (tiles_.careful && bias_.stage && !bias_.slice) clear<T>(data_.grad_bias, 0, bias_size());
    const Status cleared = each(*this, p_, run, p_.batch * p_.heads, &BackwardPass::clear_unit);
    if (cleared != Status::ok) return cleared;
    stage_ = {FOR_QUERIES | FOR_KEYS, 0, 0, 0};
    if (run.threads <= 1 || units() >= run.threads) {
      return each(*this, p_, run, units(), &BackwardPass::region_unit);
    }
    const Status keys = make_apart(run, FOR_KEYS);
    return keys == Status::ok ? make_apart(run, FOR_QUERIES) : keys;
  }

  // The gradients of one kind, by stages in which several units share a head.
  Status make_apart(const Run& run, int wanted) {
    if (!wants(wanted)) return Status::ok;
    const int64_t split = wanted == FOR_KEYS ? blocks_of(size_.blocks, KEY_RUN) : blocks_of(size_.tiles, bias_.chunk);
    for (int64_t head = 0; head < unit_heads(); ++head) {
      for (int64_t part = 0; part < size_.parts; ++part) {
        stage_ = {wanted, split, head, part};
        const Status status = each(*this, p_, run, units() * split, &BackwardPass::region_unit);
        if (status != Status::ok) return status;
      }
    }
    return Status::ok;
  }

  bool wants(int stage) const {
    if (bias_.stage & stage) return true;
    return stage == FOR_KEYS ? data_.grad_key || data_.grad_value : data_.grad_query != nullptr;
  }

  int64_t unit_heads() const { return bias_.all_heads ? p_.heads : group(); }
  int64_t units() const { return (bias_.all_batch ? least(p_.batch, 1) : p_.batch) * (bias_.all_heads ? 1 : p_.kv_heads); }

  void region_unit(int64_t unit, BackwardScratch<T>& scratch, Worker& worker) {
    const int64_t piece = stage_.split ? unit % stage_.split : 0, at = stage_.split ? unit / stage_.split : unit;
    const int64_t columns = bias_.all_heads ? 1 : p_.kv_heads, b = at / columns, h = at % columns * group();
    Region region;
    region.batch = bias_.all_batch ? Range{0, p_.batch} : Range{b, b + 1};
    region.heads = {h, h + unit_heads()};
    region.parts = {0, size_.parts};
    region.tiles = region.keys = {0, NO_BLOCK};
    region.wanted = stage_.wanted;
    if (stage_.split) {
      region.heads = {h + stage_.head, h + stage_.head + 1};
      region.parts = {stage_.part, stage_.part + 1};
      if (stage_.wanted == FOR_KEYS) region.keys = {piece * KEY_RUN, (piece + 1) * KEY_RUN};
      if (stage_.wanted == FOR_QUERIES) region.tiles = {piece * bias_.chunk, (piece + 1) * bias_.chunk};
    }
    cover(region, scratch, worker);
  }

  void cover(const Region& region, BackwardScratch<T>& scratch, Worker& worker) {
    for (int64_t h = region.heads.first; h < region.heads.stop; ++h) {
      for (int64_t part = region.parts.first; part < region.parts.stop; ++part) {
        for (int64_t b = region.batch.first; b < region.batch.stop; ++b) {
          const qkv::Member& member = member_of(p_, b, h);
          if (part >= member.count) continue;
          const Scene<T> scene{p_, member.parts[part], b, h};
          const int64_t stop = least(region.tiles.stop, scene.part.schedule.rows);
          for (int64_t tile = region.tiles.first; tile < stop; tile += TOGETHER) {
            if (worker.stopped()) return;
            tiles_.walk(scene, region, tile, least(TOGETHER, stop - tile), scratch, worker);
          }
        }
      }
    }
  }

  // work(gradient, its first number, how many) for those of a head: keys and values of a key head come with the first of
  // its query heads.
  template <class Work>
  void of_head(int64_t head, Work work) {
    const int64_t b = head / p_.heads, h = head % p_.heads;
    const Range queries = queries_of(p_, b), keys = keys_of(p_, b);
    const int64_t row = first_row(p_, b, h), rows = queries.stop - queries.first;
    if (data_.grad_query) work(&Backward::grad_query, row * p_.head_dim, rows * p_.head_dim);
    if (h % group()) return;
    const int64_t key = first_key_row(p_, b, h / group()), count = keys.stop - keys.first;
    if (data_.grad_key) work(&Backward::grad_key, key * p_.head_dim, count * p_.head_dim);
    if (data_.grad_value) work(&Backward::grad_value, key * p_.value_dim, count * p_.value_dim);
  }

  void clear_unit(int64_t head, BackwardScratch<T>&, Worker&) {
    of_head(head, [&](auto grad, int64_t first, int64_t count) { clear<T>(data_.*grad, first, count); });
  }

  // To the narrow numbers of the caller.
  void round_unit(int64_t head, BackwardScratch<T>& scratch, Worker&) {
    of_head(head, [&](auto grad, int64_t first, int64_t count) {
      const void* const to = static_cast<const char*>(given_.*grad) + first * size_of(p_.type);
      const Rows row{to, p_.type, 0, 1, nullptr, 0, 1};
      store_rows(static_cast<const T*>(data_.*grad) + first, 0, count, scratch.ones, row);
    });
  }

  static bool all_finite(const void* data, int64_t first, int64_t count) {
    const T* numbers = static_cast<const T*>(data) + first;
    const int64_t whole = count / LANES<T> * LANES<T>;
    bool good = finite(numbers, 0, 1, whole);
    for (int64_t i = whole; i < count; ++i) good = good && numbers[i] - numbers[i] == 0;
    return good;
  }

  void look_unit(int64_t head, BackwardScratch<T>&, Worker&) {
    bool good = true;
    of_head(head, [&](auto grad, int64_t first, int64_t count) {
      good = good && all_finite(data_.*grad, first, count);
    });
    if (head == 0 && data_.grad_bias) {
      good = good && (bias_.slice ? all_finite(bias_.sums, 0, slices())
                             : all_finite(data_.grad_bias, 0, bias_size()));
    }
    if (!good) __atomic_store_n(&finite_, false, __ATOMIC_RELAXED);
  }

  // Batch rows, heads and chunks in this order.
  void reduce_slices() {
    if (!bias_.slice) return;
    const Bias& bias = p_.bias;
    const bool rule = bias.kind != BiasKind::tensor;
    const int64_t size[2] = {rule ? 1 : bias.size[0], rule ? p_.heads : bias.size[1]};
    T* grad = static_cast<T*>(data_.grad_bias);
    clear<T>(grad, 0, size[0] * size[1] * bias_.slice);
    const T* from = bias_.sums;
    for (int64_t b = 0; b < p_.batch; ++b) {
      for (int64_t h = 0; h < p_.heads; ++h) {
        T* to = grad + ((size[0] > 1 ? b : 0) * size[1] + (size[1] > 1 ? h : 0)) * bias_.slice;
        for (int64_t c = 0; c < bias_.chunks; ++c, from += bias_.slice) {
          for (int64_t i = 0; i < bias_.slice; ++i) to[i] += from[i];
        }
      }
    }
  }

  void reduce_sinks() {
    if (!data_.grad_sinks) return;
    const int64_t tiles = blocks_of(p_.queries, TILE);
    T* grad = static_cast<T*>(data_.grad_sinks);
    clear<T>(grad, 0, p_.heads);
    const T* from = static_cast<const T*>(sinks_.data());
    for (int64_t b = 0; b < p_.batch; ++b) {
      for (int64_t h = 0; h < p_.heads; ++h) {
        for (int64_t t = 0; t < tiles; ++t) grad[h] += *from++;
      }
    }
  }

  const Problem& p_;
  Backward data_, given_;  // with gradients in the computing type, and as they are asked for
  PlanSize size_;
  BiasGradient<T> bias_;
  Buffer wide_, deltas_, slices_, sinks_;
  TileGradients<Unit> tiles_{p_, data_, bias_, size_.parts > 1};
  bool finite_ = true;
  Stage stage_{};
};

inline Status run_backward(const Problem& problem, const Backward& data, const Run& run) {
  if (problem.type == Type::float64) return BackwardPass<PlainBackward<double>>(problem, data).run(run);
  return BackwardPass<PlainBackward<float>>(problem, data).run(run);
}

}  // namespace
