// The product of pairs on AMX: eight tiles of 16 rows of 64 bytes; four of them sum, two hold rows of A, two words of B.
// QKV_SOFTWARE_TILES makes the same of plain code, so that what leads to the tiles is tested on any processor.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
#pragma once

#include "pairs-inl.h"

namespace {

constexpr int64_t TILE_SIDE = 16;     // rows, and words of a row
constexpr int FIRST_A = 4, FIRST_B = 6;  // tiles

#if defined(QKV_SOFTWARE_TILES)

struct SoftwareTile {
  uint32_t words[TILE_SIDE][TILE_SIDE];
};
thread_local SoftwareTile software_tiles[8];
thread_local bool tiles_configured = false;

inline void configure_tiles() { tiles_configured = true; }
inline void release_tiles() { tiles_configured = false; }

template <int N>
inline void zero_tile() {
  software_tiles[N] = {};
}
template <int N>
inline void load_tile(const void* from, int64_t stride) {
  if (!tiles_configured) __builtin_trap();
  for (int64_t r = 0; r < TILE_SIDE; ++r) {
    __builtin_memcpy(software_tiles[N].words[r], static_cast<const char*>(from) + r * stride, 4 * TILE_SIDE);
  }
}
template <int N>
inline void store_tile(void* to, int64_t stride) {
  for (int64_t r = 0; r < TILE_SIDE; ++r) {
    __builtin_memcpy(static_cast<char*>(to) + r * stride, software_tiles[N].words[r], 4 * TILE_SIDE);
  }
}
template <int SUM, int A, int B>
inline void multiply_tile() {
  for (int64_t r = 0; r < TILE_SIDE; ++r) {
    U<float> row;
    __builtin_memcpy(&row, software_tiles[SUM].words[r], sizeof row);
    F<float> sum = (F<float>)row;
    for (int64_t k = 0; k < TILE_SIDE; ++k) {
      sum = Factors<Pairs>::add(sum, software_tiles[A].words[r][k], Factors<Pairs>::right(software_tiles[B].words[k]));
    }
    __builtin_memcpy(software_tiles[SUM].words[r], &sum, sizeof sum);
  }
}

#else

// What `ldtilecfg` reads: all eight tiles whole.
struct TileConfiguration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfiguration) == 64, "as the processor reads it");

inline void configure_tiles() {
  const TileConfiguration configuration;
  __asm__ volatile("ldtilecfg %0" ::"m"(configuration));  // whole: the intrinsic of GCC 12 tells of 8 bytes only
}
inline void release_tiles() { _tile_release(); }

// The intrinsics take tiles as literals.
#define QKV_EACH_TILE(intrinsic, ...)                                 \
  if constexpr (N == 0) intrinsic(0, ##__VA_ARGS__);                  \
  else if constexpr (N == 1) intrinsic(1, ##__VA_ARGS__);             \
  else if constexpr (N == 2) intrinsic(2, ##__VA_ARGS__);             \
  else if constexpr (N == 3) intrinsic(3, ##__VA_ARGS__);             \
  else if constexpr (N == 4) intrinsic(4, ##__VA_ARGS__);             \
  else if constexpr (N == 5) intrinsic(5, ##__VA_ARGS__);             \
  else if constexpr (N == 6) intrinsic(6, ##__VA_ARGS__);             \
  else intrinsic(7, ##__VA_ARGS__)

template <int N>
inline void zero_tile() {
  QKV_EACH_TILE(_tile_zero);
}
template <int N>
inline void load_tile(const void* from, int64_t stride) {
  QKV_EACH_TILE(_tile_loadd, from, stride);
}
template <int N>
inline void store_tile(void* to, int64_t stride) {
  QKV_EACH_TILE(_tile_stored, to, stride);
}
#undef QKV_EACH_TILE

template <int SUM, int A, int B>
inline void multiply_tile() {
  static_assert(SUM == 2 * (A - FIRST_A) + B - FIRST_B, "a tile sums one row of tiles by one column");
  if constexpr (SUM == 0) _tile_dpbf16ps(0, 4, 6);
  else if constexpr (SUM == 1) _tile_dpbf16ps(1, 4, 7);
  else if constexpr (SUM == 2) _tile_dpbf16ps(2, 5, 6);
  else _tile_dpbf16ps(3, 5, 7);
}

#endif

// Stores before this are in memory after it: the loads of tiles do not say what they read.
inline void settle_memory() { __asm__ volatile("" ::: "memory"); }

// Tiles are the calling thread's while this lives. It must not live where foreign code may run, such as a signal handler
// that the poll of a call lets in: that may use tiles of its own.
struct Tiles {
  Tiles() { configure_tiles(); }
  ~Tiles() { release_tiles(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// ROWS by COLUMNS tiles of C, one or two of each.
template <int ROWS, int COLUMNS>
void tiles_of(const Product<Pairs>& p, int64_t row, int64_t column, int64_t depth) {
  float* const c = p.c + row * p.c_stride + column;
  float* const lower = c + TILE_SIDE * p.c_stride;
  settle_memory();
  const int64_t c_bytes = p.c_stride * 4, a_bytes = p.a_stride * 2, b_bytes = p.b_stride * 4;
  if (p.start == Start::zero) {
    zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
  } else {
    load_tile<0>(c, c_bytes);
    if constexpr (COLUMNS > 1) load_tile<1>(c + TILE_SIDE, c_bytes);
    if constexpr (ROWS > 1) load_tile<2>(lower, c_bytes);
    if constexpr (ROWS > 1 && COLUMNS > 1) load_tile<3>(lower + TILE_SIDE, c_bytes);
  }
  const uint16_t* a = p.a + row * p.a_stride;
  const uint32_t* b = p.b + column;
  for (int64_t k = 0; k < depth; k += 2 * TILE_SIDE, a += 2 * TILE_SIDE, b += TILE_SIDE * p.b_stride) {
    load_tile<FIRST_A>(a, a_bytes);
    load_tile<FIRST_B>(b, b_bytes);
    multiply_tile<0, FIRST_A, FIRST_B>();
    if constexpr (COLUMNS > 1) load_tile<FIRST_B + 1>(b + TILE_SIDE, b_bytes), multiply_tile<1, FIRST_A, FIRST_B + 1>();
    if constexpr (ROWS > 1) {
      load_tile<FIRST_A + 1>(a + TILE_SIDE * p.a_stride, a_bytes), multiply_tile<2, FIRST_A + 1, FIRST_B>();
    }
    if constexpr (ROWS > 1 && COLUMNS > 1) multiply_tile<3, FIRST_A + 1, FIRST_B + 1>();
  }
  store_tile<0>(c, c_bytes);
  if constexpr (COLUMNS > 1) store_tile<1>(c + TILE_SIDE, c_bytes);
  if constexpr (ROWS > 1) store_tile<2>(lower, c_bytes);
  if constexpr (ROWS > 1 && COLUMNS > 1) store_tile<3>(lower + TILE_SIDE, c_bytes);
}

// C times a number: one a column, or one for all.
inline void fade(const Product<Pairs>& p, int64_t rows, int64_t columns, const float* factors, float scale) {
  for (int64_t n = 0; n < columns; n += LANES<float>) {
    const F<float> factor = factors ? load(factors + n) : splat(scale);
    for (int64_t r = 0; r < rows; ++r) {
      float* const at = p.c + r * p.c_stride + n;
      store(at, load(at) * factor);
    }
  }
}

// Rows and columns in whole tiles, depth in whole pairs of them.
inline void multiply_tiles(const Product<Pairs>& p, int64_t rows, int64_t columns, int64_t depth) {
  if (p.start == Start::fade) fade(p, rows, columns, p.decay, 1);
  for (int64_t r = 0; r < rows; r += 2 * TILE_SIDE) {
    const bool two_rows = r + TILE_SIDE < rows;
    for (int64_t n = 0; n < columns; n += 2 * TILE_SIDE) {
      const bool two_columns = n + TILE_SIDE < columns;
      if (two_rows) {
        two_columns ? tiles_of<2, 2>(p, r, n, depth) : tiles_of<2, 1>(p, r, n, depth);
      } else {
        two_columns ? tiles_of<1, 2>(p, r, n, depth) : tiles_of<1, 1>(p, r, n, depth);
      }
    }
  }
  if (p.scale != 1) fade(p, rows, columns, nullptr, p.scale);
}

}  // namespace
