// Random plans: members of several parts over disjoint pairs, each part in an order of its own.
#pragma once

#include <algorithm>
#include <map>
#include <vector>

#include "tensors.h"

namespace driver {

using qkv::TILE;

// Tables of one part, owned.
struct PartTables {
  Exact<int32_t> query_rows, key_rows, row_ptr, runs, partial_ptr, partial;
  Exact<uint64_t> masks;
};

struct PlanTables {
  std::vector<PartTables> parts;
  std::vector<Exact<qkv::Part>> members;
  Exact<qkv::Member> member_table;
  Exact<int32_t> index;
};

// Which pairs of a call a member has given away already.
class Claims {
 public:
  Claims(int64_t queries, int64_t keys) : keys_(keys), taken_(size_t(queries * keys)) {}
  bool free(int64_t i, int64_t j) const { return !taken_[size_t(i * keys_ + j)]; }
  void take(int64_t i, int64_t j) { taken_[size_t(i * keys_ + j)] = 1; }

 private:
  int64_t keys_;
  std::vector<uint8_t> taken_;
};

enum class Shape { random, dense, causal, window };

// What a shape says of the pair of slots (i, j); `random` is decided tile by tile.
inline bool in_shape(Shape shape, int64_t i, int64_t j) {
  if (shape == Shape::causal) return j <= i;
  return shape == Shape::window ? j <= i + 3 && i <= j + 70 : true;
}

// Row of each slot: natural (null), permuted, a subset, or padded in between.
inline std::vector<int32_t> random_rows(Random& random, int64_t count) {
  std::vector<int32_t> rows;
  const double kept = random.chance(0.5) ? 1.0 : 0.6, padding = random.chance(0.5) ? 0.0 : 0.1;
  for (int64_t i = 0; i < count; ++i) {
    if (random.chance(kept)) rows.push_back(int32_t(i));
  }
  if (random.chance(0.5)) random.shuffle(rows);
  std::vector<int32_t> slots;
  for (int32_t row : rows) {
    while (random.chance(padding)) slots.push_back(-1);
    slots.push_back(row);
  }
  while (random.chance(padding)) slots.push_back(-1);
  return slots;
}

class PartMaker {
 public:
  PartMaker(Random& random, Claims& claims, int64_t queries, int64_t keys, bool natural)
      : random_(random), claims_(claims), shape_(Shape(random.below(4))) {
    query_natural_ = natural || random.chance(0.3);
    key_natural_ = natural || random.chance(0.3);
    query_rows_ = slots(query_natural_, queries);
    key_rows_ = slots(key_natural_, keys);
    density_ = random.uniform();
  }

  qkv::Part make(PartTables& tables) {
    const int64_t rows = blocks(query_rows_), cols = blocks(key_rows_);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t col = 0; col < cols; ++col) tile(row, col);
      row_ptr_.push_back(int32_t(runs_.size() / 2));
      partial_ptr_.push_back(int32_t(partial_.size() / 2));
    }
    tables.query_rows = Exact<int32_t>(query_rows_);
    tables.key_rows = Exact<int32_t>(key_rows_);
    tables.row_ptr = Exact<int32_t>(row_ptr_);
    tables.runs = Exact<int32_t>(runs_);
    tables.partial_ptr = Exact<int32_t>(partial_ptr_);
    tables.partial = Exact<int32_t>(partial_);
    tables.masks = Exact<uint64_t>(masks_);
    const qkv::Schedule schedule = {rows,
                                    cols,
                                    tables.row_ptr.data(),
                                    tables.runs.data(),
                                    tables.partial_ptr.data(),
                                    tables.partial.data(),
                                    tables.masks.data()};
    return {query_natural_ ? nullptr : tables.query_rows.data(), int64_t(query_rows_.size()),
            key_natural_ ? nullptr : tables.key_rows.data(), int64_t(key_rows_.size()), schedule};
  }

 private:
  static int64_t blocks(const std::vector<int32_t>& rows) { return (int64_t(rows.size()) + TILE - 1) / TILE; }

  static int64_t end(const std::vector<int32_t>& rows, int64_t block) {
    return std::min(TILE, int64_t(rows.size()) - block * TILE);
  }

  std::vector<int32_t> slots(bool natural, int64_t count) {
    if (!natural) return random_rows(random_, count);
    std::vector<int32_t> rows(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) rows[size_t(i)] = int32_t(i);
    return rows;
  }

  void tile(int64_t row, int64_t col) {
    const double kind = random_.uniform();
    if (shape_ == Shape::random && kind < 0.3) return;
    const double density = shape_ != Shape::random ? 1 : kind < 0.6 ? 1 : density_ * density_;
    std::vector<uint64_t> words(TILE);
    bool whole = true, any = false;
    for (int64_t k = 0; k < end(key_rows_, col); ++k) {
      for (int64_t t = 0; t < end(query_rows_, row); ++t) {
        const int32_t i = query_rows_[size_t(row * TILE + t)], j = key_rows_[size_t(col * TILE + k)];
        const bool seen = i >= 0 && j >= 0 && in_shape(shape_, row * TILE + t, col * TILE + k) && claims_.free(i, j) &&
                          (density == 1 || random_.chance(density));
        if (seen) claims_.take(i, j), words[size_t(k)] |= uint64_t(1) << t;
        whole &= seen;
        any |= seen;
      }
    }
    if (whole && !random_.chance(0.1)) return add_full(col);  // else full, but told by a mask
    if (!any && !random_.chance(0.05)) return;
    partial_.push_back(int32_t(col));
    partial_.push_back(number_of(words));
  }

  void add_full(int64_t col) {
    const bool first_of_row = int32_t(runs_.size() / 2) == row_ptr_.back();
    if (!first_of_row && runs_.back() == col && !random_.chance(0.1)) {
      runs_.back() = int32_t(col + 1);
      return;
    }
    runs_.push_back(int32_t(col));
    runs_.push_back(int32_t(col + 1));
  }

  int32_t number_of(const std::vector<uint64_t>& words) {
    const auto [found, fresh] = known_.emplace(words, int32_t(known_.size()));
    if (fresh) masks_.insert(masks_.end(), words.begin(), words.end());
    return found->second;
  }

  Random& random_;
  Claims& claims_;
  Shape shape_;
  bool query_natural_, key_natural_;
  double density_;
  std::vector<int32_t> query_rows_, key_rows_, row_ptr_{0}, runs_, partial_ptr_{0}, partial_;
  std::vector<uint64_t> masks_;
  std::map<std::vector<uint64_t>, int32_t> known_;
};

inline Exact<qkv::Part> random_member(Random& random, PlanTables& tables, Claims claims, int64_t queries,
                                      int64_t keys) {
  std::vector<qkv::Part> parts;
  const int64_t count = random.chance(0.5) ? 1 : random.below(4);
  for (int64_t n = 0; n < count && queries && keys; ++n) {
    PartMaker maker(random, claims, queries, keys, n == 0 && random.chance(0.7));
    tables.parts.emplace_back();
    parts.push_back(maker.make(tables.parts.back()));
  }
  return Exact<qkv::Part>(parts);
}

// Some queries that see nothing and some keys that nobody sees, where all members agree on that.
inline Claims random_hidden(Random& random, int64_t queries, int64_t keys) {
  Claims claims(queries, keys);
  const double query_share = random.chance(0.2) ? 0.2 : 0, key_share = random.chance(0.4) ? 0.3 : 0;
  for (int64_t i = 0; i < queries; ++i) {
    if (!random.chance(query_share)) continue;
    for (int64_t j = 0; j < keys; ++j) claims.take(i, j);
  }
  for (int64_t j = 0; j < keys; ++j) {
    if (!random.chance(key_share)) continue;
    for (int64_t i = 0; i < queries; ++i) claims.take(i, j);
  }
  return claims;
}

// A member for each batch row, of the row's own sizes.
template <class Sizes>
qkv::Plan packed_plan(Random& random, PlanTables& tables, int64_t batch, Sizes sizes) {
  std::vector<qkv::Member> members;
  std::vector<int32_t> index;
  for (int64_t b = 0; b < batch; ++b) {
    const auto [queries, keys] = sizes(b);
    tables.members.push_back(random_member(random, tables, random_hidden(random, queries, keys), queries, keys));
    members.push_back({tables.members.back().data(), int64_t(tables.members.back().size())});
    index.push_back(int32_t(b));
  }
  tables.member_table = Exact<qkv::Member>(members);
  tables.index = Exact<int32_t>(index);
  return {tables.member_table.data(), batch, tables.index.data(), 1, 0};
}

// Members for all (b, h), told apart along none, one or both axes.
inline qkv::Plan random_plan(Random& random, PlanTables& tables, int64_t batch, int64_t heads, int64_t queries,
                             int64_t keys) {
  const int64_t rows = random.chance(0.5) ? batch : std::min<int64_t>(batch, 1);
  const int64_t columns = random.chance(0.5) ? heads : 1;
  const int64_t count = rows ? random.between(1, std::min<int64_t>(rows * columns, 3)) : 0;
  const Claims hidden = random_hidden(random, queries, keys);
  std::vector<qkv::Member> members;
  for (int64_t m = 0; m < count; ++m) {
    tables.members.push_back(random_member(random, tables, hidden, queries, keys));
    members.push_back({tables.members.back().data(), int64_t(tables.members.back().size())});
  }
  std::vector<int32_t> index;
  for (int64_t n = 0; n < rows * columns; ++n) index.push_back(int32_t(random.below(count)));
  tables.member_table = Exact<qkv::Member>(members);
  tables.index = Exact<int32_t>(index);
  return {tables.member_table.data(), count, tables.index.data(), rows > 1 ? columns : 0, columns > 1 ? 1 : 0};
}

}  // namespace driver
