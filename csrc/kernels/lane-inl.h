// One sequence of one value head of the linear family: where its tokens, states and checkpoints lie, in chunks of tokens.
#pragma once

#include "../linear.h"
#include "pass-inl.h"
#include "sums-inl.h"

namespace {

using qkv::Feature;
using qkv::Gates;
using qkv::Recurrence;
using qkv::Stride;

constexpr int64_t CHUNK = 64;            // tokens between checkpoints
constexpr int64_t BLOCKS = CHUNK / BLOCK;
constexpr int64_t PART = 64;             // columns of v whose state stays near

// Small numbers count as zero while it lives: a state that fades would otherwise become slow.
class Flushing {
 public:
#if defined(__x86_64__)
  Flushing() : kept_(_mm_getcsr()) { _mm_setcsr(kept_ | 0x8040); }
  ~Flushing() { _mm_setcsr(kept_); }

 private:
  unsigned kept_;
#elif defined(__aarch64__)
  Flushing() {
    asm volatile("mrs %0, fpcr" : "=r"(kept_));
    asm volatile("msr fpcr, %0" ::"r"(kept_ | (uint64_t{1} << 24)));
  }
  ~Flushing() { asm volatile("msr fpcr, %0" ::"r"(kept_)); }

 private:
  uint64_t kept_;
#endif
};

// How many chunks the sequences before each one have, and all of them.
class ChunkCounts {
 public:
  bool count(const Recurrence& p) {
    each_ = blocks_of(p.length, CHUNK);
    if (!p.starts) return true;
    if (!packed_.reserve(static_cast<size_t>(p.sequences + 1) * sizeof(int64_t))) return false;
    int64_t all = 0, *const before = static_cast<int64_t*>(packed_.data());
    for (int64_t n = 0; n < p.sequences; ++n) {
      before[n] = all;
      all += blocks_of(p.starts[n + 1] - p.starts[n], CHUNK);
    }
    before[p.sequences] = all;
    return true;
  }
  int64_t before(int64_t sequence) const {
    return packed_.data() ? static_cast<const int64_t*>(packed_.data())[sequence] : sequence * each_;
  }

 private:
  Buffer packed_;
  int64_t each_ = 0;
};

// One sequence of one value head.
struct Lane {
  int64_t sequence, head, key_head, batch, first, count, checkpoint;  // first: its token 0 in the tensors

  Lane(const Recurrence& p, const ChunkCounts& chunks, int64_t unit) : sequence(unit / p.heads), head(unit % p.heads) {
    key_head = head / (p.heads / p.key_heads);
    batch = p.starts ? 0 : sequence;
    first = p.starts ? p.starts[sequence] : 0;
    count = p.starts ? p.starts[sequence + 1] - first : p.length;
    checkpoint = head * chunks.before(p.sequences) + chunks.before(sequence);
  }

  int64_t chunks() const { return blocks_of(count, CHUNK); }
  int64_t tokens(int64_t chunk) const { return least(CHUNK, count - chunk * CHUNK); }
  int64_t state(const Recurrence& p) const { return (sequence * p.heads + head) * p.key_dim * width(p); }
  static int64_t width(const Recurrence& p) { return p.value_dim + p.normalize; }

  // The tokens of a chunk in a tensor.
  Rows rows(const void* data, Type type, const Stride& stride, int64_t of_head, int64_t chunk) const {
    const int64_t offset = batch * stride.batch + of_head * stride.head + (first + chunk * CHUNK) * stride.token;
    return {static_cast<const char*>(data) + offset * size_of(type), type, stride.token, 1, nullptr, 0, tokens(chunk)};
  }
};

// The same rows from a column on.
inline Rows from_column(Rows rows, int64_t column) {
  rows.data = static_cast<const char*>(rows.data) + column * size_of(rows.type);
  return rows;
}

// The tokens of the next chunk, asked for while this one is worked on, block by block.
struct Ahead {
  Rows rows[4];
  int64_t widths[4];

  __attribute__((always_inline)) void ask(int64_t block) const {
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {
      const int64_t some = widths[n] ? least(BLOCK, rows[n].count - block * BLOCK) : 0;
      if (some > 0) ask_for(rows[n], block * BLOCK, some, widths[n]);
    }
  }
};

template <class Data>
Ahead next_chunk(const Recurrence& p, const Data& data, const Lane& lane, int64_t chunk) {
  const bool gates = p.gates == Gates::vector;  // single numbers a token lie near enough
  const Rows query = lane.rows(data.query, p.type, p.query, lane.key_head, chunk + 1);
  return {{query, lane.rows(data.key, p.type, p.key, lane.key_head, chunk + 1),
           lane.rows(data.value, p.type, p.value, lane.head, chunk + 1),
           gates ? lane.rows(data.gate, p.gate_type, p.gate, lane.head, chunk + 1) : query},
          {p.key_dim, p.key_dim, p.value_dim, gates ? p.key_dim : 0}};
}

}  // namespace
