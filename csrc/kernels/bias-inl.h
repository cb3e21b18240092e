// What is added to the scores of a tile, in bits, and the way back for its gradient.
#pragma once

#include "scene-inl.h"

namespace {

constexpr int64_t STRIP_SIZE = 2 * TILE;  // distances between the queries and the keys of a tile in natural order

// Numbers for a tile: that of (key, lane) stands at at[key * stride + lane]; null `at`: none.
template <class T>
struct TileBias {
  const T* at = nullptr;
  int64_t stride = 0;
};

// A number in bits, where a finite one stays finite.
template <class V, class T>
inline V in_bits(V x, T) {
  constexpr T GREATEST = static_cast<T>(sizeof(T) == 4 ? __FLT_MAX__ : __DBL_MAX__);
  V bits = x * static_cast<T>(LOG2_E);
  bits = bits < -GREATEST ? (x < -GREATEST ? x : x - x - GREATEST) : bits;
  return bits > GREATEST ? x - x + GREATEST : bits;
}

// A bias of any floating-point type, number by number.
template <class T>
T number_of(const void* data, Type type, int64_t index) {
  switch (type) {
    case Type::float64: return static_cast<T>(static_cast<const double*>(data)[index]);  // finite ones fit: see abi.h
    case Type::float32: return static_cast<T>(static_cast<const float*>(data)[index]);
    case Type::float16: return static_cast<T>(number_as<float>(static_cast<const Half*>(data)[index]));
    default: return static_cast<T>(number_as<float>(static_cast<const Bfloat*>(data)[index]));
  }
}

// What a rule adds at the distance j - i: slopes of ALiBi or a table of relative positions.
template <class T>
struct Rule {
  const T* numbers;
  int64_t radius;  // of a table; -1: one slope

  T at(int64_t distance) const {
    if (radius >= 0) return in_bits(numbers[entry(distance)], T());
    return in_bits(-numbers[0] * static_cast<T>(distance < 0 ? -distance : distance), T());
  }
  int64_t entry(int64_t distance) const { return most(-radius, least(radius, distance)) + radius; }
};

template <class T>
Rule<T> rule_of(const Scene<T>& scene, const void* data) {
  const Bias& bias = scene.problem.bias;
  const T* numbers = static_cast<const T*>(data);
  if (bias.kind == BiasKind::alibi) return {numbers + scene.h, -1};
  return {numbers + scene.h * bias.size[1], bias.size[1] / 2};
}

// In natural order the distance of (key, lane) is that of key 0 and query 0 + key - lane: one number a diagonal.
template <class T>
TileBias<T> strip_bias(const Rule<T>& rule, const Positions& at, T* strip) {
  const int64_t middle = at.keys[0] - at.queries[0];
  for (int64_t u = 0; u < STRIP_SIZE; ++u) strip[u] = rule.at(middle + TILE - 1 - u);
  return {strip + TILE - 1, -1};
}

template <class T>
TileBias<T> gathered_bias(const Rule<T>& rule, const Positions& at, Range keys, int64_t width, T* tile) {
  for (int64_t k = keys.first; k < keys.stop; ++k) {
    for (int64_t i = 0; i < width; ++i) tile[k * width + i] = rule.at(at.keys[k] - at.queries[i]);
  }
  return {tile, width};
}

// A tensor that is dense along the keys, in natural order: whole rows, turned round.
template <class T>
void turned_bias(const Rows& rows, int64_t first_key, Range keys, int64_t width, T* by_query, T* tile) {
  const int64_t columns = padded<T>(keys.stop);
  with_stored<T>(rows.type, [&](auto stored) {
    using E = decltype(stored);
    for (int64_t i = 0; i < width; ++i) {
      const E* from = i < rows.count ? rows.at<E>(i) + first_key : nullptr;
      T* to = by_query + i * TILE;
      int64_t k = 0;
      if (from) {
        for (; k + LANES<T> <= keys.stop; k += LANES<T>) {
          __builtin_prefetch(from + k + TILE);  // what the next tile will read, which no pattern of addresses foretells
          store(to + k, in_bits(load_as<T>(from + k), T()));
        }
        for (; k < keys.stop; ++k) to[k] = in_bits(number_as<T>(from[k]), T());
      }
      for (; k < columns; ++k) to[k] = 0;
    }
  });
  transpose(by_query, TILE, width, columns, tile, width);
}

// Whether numbers of a type are read as T without a loss of range.
template <class T>
bool stored_beside(Type type) {
  return type == TypeOf<T>::VALUE || (sizeof(T) == 4 && type != Type::float64);
}

template <class T>
TileBias<T> tensor_bias(const Scene<T>& scene, const void* data, int64_t tile_number, int64_t block, Range keys,
                        int64_t width, T* scratch, T* tile) {
  const Bias& bias = scene.problem.bias;
  const int64_t base = scene.b * bias.stride[0] + scene.h * bias.stride[1];
  const char* const first = static_cast<const char*>(data) + base * size_of(bias.type);
  const Matrix matrix{first, bias.type, bias.stride[2], bias.stride[3]};
  const Rows rows = scene.query_rows(matrix, tile_number);
  if (stored_beside<T>(bias.type) && bias.stride[3] == 1 && bias.stride[2] != 0 && scene.natural()) {
    turned_bias(rows, block * TILE, keys, width, scratch, tile);
    return {tile, width};
  }
  const Rows columns = scene.key_rows(matrix, block);
  const Range filled = bias.stride[3] == 0 ? Range{0, 1} : keys;
  for (int64_t k = filled.first; k < filled.stop; ++k) {
    const int64_t column = base + most(columns.row(k), 0) * bias.stride[3];
    if (bias.stride[2] == 0) {
      const F<T> number = splat(in_bits(number_of<T>(data, bias.type, column), T()));
      for (int64_t i = 0; i < width; i += LANES<T>) store(tile + k * width + i, number);
      continue;
    }
    for (int64_t i = 0; i < width; ++i) {
      const int64_t row = i < rows.count ? most(rows.row(i), 0) : 0;
      tile[k * width + i] = in_bits(number_of<T>(data, bias.type, column + row * bias.stride[2]), T());
    }
  }
  return {tile, bias.stride[3] == 0 ? 0 : width};
}

// The bias of a tile; `scratch` and `tile` hold TILE by TILE numbers each.
template <class T>
TileBias<T> tile_bias(const Scene<T>& scene, const void* data, int64_t tile_number, int64_t block, const Positions& at,
                      Range keys, int64_t width, T* scratch, T* tile) {
  const BiasKind kind = scene.problem.bias.kind;
  if (kind == BiasKind::none) return {};
  if (kind == BiasKind::tensor) {
    return tensor_bias(scene, data, tile_number, block, keys, width, scratch, tile);
  }
  const Rule<T> rule = rule_of(scene, data);
  return scene.natural() ? strip_bias(rule, at, tile) : gathered_bias(rule, at, keys, width, tile);
}

// Gradients of the scores of a share of a tile, by keys and lanes.
template <class T>
struct TileGradient {
  const T* ds;
  int64_t width, lanes_stop;  // lanes beyond are no queries
  Share share;
};

// Added to a tensor's gradient: summed along each axis whose stride is 0.
template <class T>
void add_tensor_gradient(const Rows& rows, const Rows& columns, const TileGradient<T>& grads) {
  for (int64_t i = grads.share.lanes.first; i < grads.lanes_stop; ++i) {
    if (rows.row(i) < 0) continue;
    T* row = rows.place<T>(i);
    T sum = 0;
    for (int64_t k = grads.share.keys.first; k < grads.share.keys.stop; ++k) {
      const T grad = grads.ds[k * grads.width + i];
      if (rows.column_stride == 0) sum += grad;
      else if (columns.row(k) >= 0) row[columns.row(k) * rows.column_stride] += grad;
    }
    if (rows.column_stride == 0) *row += sum;
  }
}

// The same where rows and keys stand as in the tensor: the tile is turned round and added in whole vectors.
template <class T>
void add_turned_gradient(const Rows& rows, int64_t first_key, const TileGradient<T>& grads, T* scratch) {
  const auto [lanes, keys] = grads.share;
  const int64_t start = keys.first / LANES<T> * LANES<T>, columns = padded<T>(keys.stop) - start;
  transpose(grads.ds + start * grads.width + lanes.first, grads.width, columns, lanes.stop - lanes.first, scratch,
            TILE);
  for (int64_t i = lanes.first; i < grads.lanes_stop; ++i) {
    const T* from = scratch + (i - lanes.first) * TILE - start;
    T* to = rows.place<T>(i) + first_key;
    int64_t k = keys.first;
    for (; k + LANES<T> <= keys.stop; k += LANES<T>) {
      __builtin_prefetch(to + k + TILE, 1);
      store(to + k, load(to + k) + load(from + k));
    }
    for (; k < keys.stop; ++k) to[k] += from[k];
  }
}

// Added to a rule's gradient: sums along diagonals in natural order, then what each distance adds to.
template <class T>
void add_rule_gradient(const Rule<T>& rule, bool natural, const Positions& at, const TileGradient<T>& grads, T* strip,
                       T* sums) {
  const auto [lanes, keys] = grads.share;
  const auto add = [&](int64_t distance, T sum) {
    if (rule.radius < 0) {
      sums[0] -= sum * static_cast<T>(distance < 0 ? -distance : distance);
    } else {
      sums[rule.entry(distance)] += sum;
    }
  };
  if (!natural) {
    for (int64_t k = keys.first; k < keys.stop; ++k) {
      for (int64_t i = lanes.first; i < grads.lanes_stop; ++i) {
        add(at.keys[k] - at.queries[i], grads.ds[k * grads.width + i]);
      }
    }
    return;
  }
  for (int64_t u = 0; u < STRIP_SIZE; u += LANES<T>) store(strip + u, F<T>{});
  for (int64_t k = keys.first; k < keys.stop; ++k) {
    T* diagonals = strip + TILE - 1 - k;
    for (int64_t i = lanes.first; i < grads.lanes_stop; ++i) diagonals[i] += grads.ds[k * grads.width + i];
  }
  const int64_t middle = at.keys[0] - at.queries[0];
  for (int64_t u = 0; u < STRIP_SIZE - 1; ++u) add(middle + TILE - 1 - u, strip[u]);
}

}  // namespace
