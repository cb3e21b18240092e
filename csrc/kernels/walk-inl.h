// The key blocks that a block of queries sees, in ascending order.
#pragma once

#include "../abi.h"

namespace {

using qkv::Schedule;
using qkv::TILE;

constexpr int64_t NO_BLOCK = INT64_MAX;

constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t blocks_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

struct Range {
  int64_t first, stop;
};

// Walks the runs and the partial blocks of one row of a schedule within a range of key blocks.
class Cursor {
 public:
  Cursor() = default;
  Cursor(const Schedule& schedule, int64_t row, Range keys)
      : run_(schedule.runs + 2 * schedule.row_ptr[row]),
        runs_end_(schedule.runs + 2 * schedule.row_ptr[row + 1]),
        partial_(schedule.partial + 2 * schedule.partial_ptr[row]),
        partial_end_(schedule.partial + 2 * schedule.partial_ptr[row + 1]),
        masks_(schedule.masks),
        stop_(keys.stop) {
    run_ = skip(run_, runs_end_, 1, keys.first + 1);
    partial_ = skip(partial_, partial_end_, 0, keys.first);
    full_ = run_ < runs_end_ ? most(run_[0], keys.first) : NO_BLOCK;
    settle();
  }

  int64_t block() const { return block_; }  // NO_BLOCK at the end
  const uint64_t* mask() const { return mask_; }  // null: full

  void next() {
    if (mask_) {
      partial_ += 2;
    } else if (++full_ == run_[1]) {
      run_ += 2;
      full_ = run_ < runs_end_ ? run_[0] : NO_BLOCK;
    }
    settle();
  }

 private:
  // The first pair whose `field` is at least `value`.
  static const int32_t* skip(const int32_t* first, const int32_t* end, int field, int64_t value) {
    int64_t count = (end - first) / 2;
    while (count > 0) {
      const int64_t half = count / 2;
      if (first[2 * half + field] < value) {
        first += 2 * (half + 1);
        count -= half + 1;
      } else {
        count = half;
      }
    }
    return first;
  }

  void settle() {
    const int64_t partial = partial_ < partial_end_ ? partial_[0] : NO_BLOCK;
    block_ = least(full_, partial);
    mask_ = partial < full_ ? masks_ + TILE * partial_[1] : nullptr;
    if (block_ >= stop_) block_ = NO_BLOCK;
  }

  const int32_t *run_ = nullptr, *runs_end_ = nullptr, *partial_ = nullptr, *partial_end_ = nullptr;
  const uint64_t* masks_ = nullptr;
  int64_t stop_ = 0, full_ = NO_BLOCK;
  int64_t block_ = NO_BLOCK;
  const uint64_t* mask_ = nullptr;
};

// The lanes of a tile that are walked together, and the keys between the first and the last that any of them sees. Where
// a tile has a mask its quarters are walked apart: those of causal patterns and of windows see fewer keys each.
struct Share {
  Range lanes, keys;

  int64_t width() const { return lanes.stop - lanes.first; }
  int64_t depth() const { return keys.stop - keys.first; }
};

// `grain`: keys come in whole multiples of it, but for the last ones of the block.
inline Share share_of(const uint64_t* mask, Range lanes, int64_t keys, int64_t grain) {
  Share share{lanes, {0, keys}};
  if (mask) {
    const uint64_t word = (lanes.stop - lanes.first >= TILE ? 0 : uint64_t{1} << (lanes.stop - lanes.first)) - 1;
    Range& seen = share.keys;
    while (seen.first < keys && !(mask[seen.first] & word << lanes.first)) ++seen.first;
    while (seen.stop > seen.first && !(mask[seen.stop - 1] & word << lanes.first)) --seen.stop;
    if (seen.stop > seen.first) {
      seen.first -= seen.first % grain;
      seen.stop = least(blocks_of(seen.stop, grain) * grain, keys);
    }
  }
  return share;
}

constexpr int64_t QUARTER = TILE / 4;

// The shares of a tile of `width` lanes: one, or where it has a mask those of `size` lanes.
struct Shares {
  Share each[4];
  int count = 0;

  Shares(const uint64_t* mask, int64_t width, int64_t keys, int64_t size = QUARTER, int64_t grain = 1) {
    const int64_t step = mask ? size : width;
    for (int64_t lane = 0; lane < width; lane += step) {
      const Share share = share_of(mask, {lane, least(lane + step, width)}, keys, grain);
      if (share.depth() > 0) each[count++] = share;
    }
  }
};

}  // namespace
