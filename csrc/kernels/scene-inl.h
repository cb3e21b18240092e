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
using qkv::Type;

// What a weight that dropout keeps is multiplied by.
template <class T>
T keep_scale_of(const Problem& problem) {
  return problem.dropout_threshold ? T(65536) / static_cast<T>(65536 - problem.dropout_threshold) : T(1);
}

template <class T>
const T* offset(const void* data, const int64_t* stride, int64_t b, int64_t h) {
  return static_cast<const T*>(data) + b * stride[0] + h * stride[1];
}

template <class T>
struct Scene {
  const Problem& problem;
  const Part& part;
  int64_t b, h;

  // Row 0 of this (b, h) in contiguous (B, H, L).
  int64_t first_row() const { return (b * problem.heads + h) * problem.queries; }
  int64_t group() const { return h / (problem.heads / problem.kv_heads); }
  bool natural() const { return !part.query_rows && !part.key_rows; }

  // Rows of a tile in a tensor whose row 0 of this (b, h) is at `data`.
  template <class E>
  Rows<E> query_rows(E* data, const int64_t* stride, int64_t tile) const {
    return {data, stride[2], stride[3], part.query_rows, tile * TILE, least(TILE, part.query_count - tile * TILE)};
  }
  template <class E>
  Rows<E> key_rows(E* data, const int64_t* stride, int64_t block) const {
    return {data, stride[2], stride[3], part.key_rows, block * TILE, least(TILE, part.key_count - block * TILE)};
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

// A block of keys or values as dense rows: in place where they stand so, else a copy.
template <class T>
struct Panel {
  const T* data;
  int64_t stride;
};

// `vectors`: rows are read in whole vectors. Rows a large power of two apart would fight for the same lines of the cache.
template <class T>
Panel<T> panel(const Rows<const T>& rows, int64_t width, bool vectors, const T* ones, T* scratch) {
  const bool dense = !rows.slots && rows.column_stride == 1 && (!vectors || width % LANES<T> == 0);
  if (dense && rows.row_stride < 2 * width) return {rows.at(0), rows.row_stride};
  load_rows(rows, width, ones, scratch, padded<T>(width));
  return {scratch, padded<T>(width)};
}

}  // namespace
