// One part of one (batch row, head): where its rows lie, and what is added to the scores of a tile.
#pragma once

#include "dropout-inl.h"
#include "memory-inl.h"
#include "rows-inl.h"

namespace {

using qkv::Bias;
using qkv::BiasKind;
using qkv::Part;
using qkv::Problem;

// What a weight that dropout keeps is multiplied by.
template <class T>
T keep_scale_of(const Problem& problem) {
  return problem.dropout_threshold ? T(65536) / static_cast<T>(65536 - problem.dropout_threshold) : T(1);
}

// The queries and keys of a batch row.
inline Range queries_of(const Problem& p, int64_t b) {
  return p.packing.queries ? Range{p.packing.queries[b], p.packing.queries[b + 1]} : Range{0, p.queries};
}
inline Range keys_of(const Problem& p, int64_t b) {
  return p.packing.keys ? Range{p.packing.keys[b], p.packing.keys[b + 1]} : Range{0, p.keys};
}

// Row 0 of (b, h) among the rows of a contiguous (B, H, L), or packed (H, all rows); and how many there are.
inline int64_t first_row(const Problem& p, int64_t b, int64_t h) {
  return p.packing.queries ? h * p.packing.queries[p.batch] + p.packing.queries[b] : (b * p.heads + h) * p.queries;
}
inline int64_t first_key_row(const Problem& p, int64_t b, int64_t g) {
  return p.packing.keys ? g * p.packing.keys[p.batch] + p.packing.keys[b] : (b * p.kv_heads + g) * p.keys;
}
inline int64_t all_rows(const Problem& p) {
  return p.heads * (p.packing.queries ? p.packing.queries[p.batch] : p.batch * p.queries);
}
inline int64_t all_key_rows(const Problem& p) {
  return p.kv_heads * (p.packing.keys ? p.packing.keys[p.batch] : p.batch * p.keys);
}

// A matrix of the caller: the rows of one (b, h) of a tensor.
struct Matrix {
  const void* data;
  Type type;
  int64_t row_stride, column_stride;

  static Matrix of(const void* tensor, Type type, const int64_t* stride, int64_t b, int64_t h, Range rows, bool packed) {
    const int64_t first = h * stride[1] + (packed ? rows.first * stride[2] : b * stride[0]);
    return {static_cast<const char*>(tensor) + first * size_of(type), type, stride[2], stride[3]};
  }
};

template <class T>
struct Scene {
  const Problem& problem;
  const Part& part;
  int64_t b, h;

  int64_t first_row() const { return ::first_row(problem, b, h); }
  int64_t group() const { return h / (problem.heads / problem.kv_heads); }
  bool natural() const { return !part.query_rows && !part.key_rows; }

  Matrix query_side(const void* tensor, Type type, const int64_t* stride) const {
    return Matrix::of(tensor, type, stride, b, h, queries_of(problem, b), problem.packing.queries);
  }
  Matrix key_side(const void* tensor, const int64_t* stride) const {
    return Matrix::of(tensor, problem.type, stride, b, group(), keys_of(problem, b), problem.packing.keys);
  }
  // Rows of a tile or a block.
  Rows query_rows(const Matrix& m, int64_t tile) const {
    const int64_t count = least(TILE, part.query_count - tile * TILE);
    return {m.data, m.type, m.row_stride, m.column_stride, part.query_rows, tile * TILE, count};
  }
  Rows key_rows(const Matrix& m, int64_t block) const {
    const int64_t count = least(TILE, part.key_count - block * TILE);
    return {m.data, m.type, m.row_stride, m.column_stride, part.key_rows, block * TILE, count};
  }
  // The same where keys and values may lie in pages.
  Rows kept_rows(const Matrix& m, int64_t block) const {
    Rows rows = key_rows(m, block);
    if (problem.pages.table) rows.table = {problem.pages.table + b * problem.pages.stride, problem.pages.size};
    return rows;
  }

  int64_t query_start() const { return problem.query_start[b * problem.query_start_stride]; }
  int64_t key_start() const { return problem.key_start[b * problem.key_start_stride]; }

  Draw draw(uint64_t seed) const {
    return {{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)},
            static_cast<uint32_t>(problem.head_origin + h),
            static_cast<uint32_t>(problem.batch_origin + b),
            problem.dropout_threshold};
  }
};

// Positions of a tile's queries for dropout and rules, TILE entries, and of its keys.
struct Positions {
  int64_t queries[TILE], keys[TILE];
  uint32_t counters[TILE];  // the queries', modulo 2^32
};

inline void locate(const int32_t* slots, int64_t start, int64_t first, int64_t count, int64_t* positions) {
  for (int64_t i = 0; i < TILE; ++i) {
    const int64_t slot = first + i;
    positions[i] = start + (i >= count ? 0 : slots ? most(slots[slot], 0) : slot);
  }
}

template <class T>
void locate_tile(const Scene<T>& scene, int64_t tile, int64_t queries, int64_t block, int64_t keys, Positions& at) {
  locate(scene.part.query_rows, scene.query_start(), tile * TILE, queries, at.queries);
  locate(scene.part.key_rows, scene.key_start(), block * TILE, keys, at.keys);
  for (int64_t i = 0; i < TILE; ++i) at.counters[i] = static_cast<uint32_t>(at.queries[i]);
}

// Rows of block after block that lie far apart: the processor does not foresee them, so a share of them is asked for
// beside each of `shares` tiles that are walked meanwhile.
__attribute__((always_inline)) inline void ask_for_share(const Rows& rows, int64_t width, int64_t share, int64_t shares) {
  if (rows.slots || rows.count <= 0 || rows.row_stride < 2 * width) return;
  const int64_t each = blocks_of(rows.count, shares), first = least(share * each, rows.count);
  ask_for(rows, first, least(each, rows.count - first), width);
}

// A block of keys or values as dense rows: in place where they stand so, else a copy.
template <class T>
struct Panel {
  const T* data;
  int64_t stride;
};

// `vectors`: rows are read in whole vectors. Rows a large power of two apart would fight for the same lines of the cache.
template <class T>
Panel<T> panel(const Rows& rows, int64_t width, bool vectors, const T* ones, T* scratch) {
  const bool dense = rows.type == TypeOf<T>::VALUE && rows.even() && rows.column_stride == 1;
  const bool whole = !vectors || width % LANES<T> == 0;
  if (dense && whole && rows.row_stride < 2 * width) return {rows.at<T>(0), rows.row_stride};
  load_rows(rows, width, ones, scratch, padded<T>(width));
  return {scratch, padded<T>(width)};
}

}  // namespace
