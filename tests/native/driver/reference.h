// Attention and its gradients from the definition, densely and in double. It shares no code with the kernels.
#pragma once

#include <array>

#include "problems.h"

namespace driver {

// A result, and the sum of the sizes of its terms, each times how far rounding of its row's scores may carry it: an
// error is judged relative to `size`.
struct Sum {
  double value = 0, size = 0;
  void add(double term, double size_of_term) { value += term, size += size_of_term; }
};
using Sums = std::vector<Sum>;

struct Truth {
  Sums output, lse, max_scores, entropy;                         // by Case::query_row
  Sums grad_query, grad_key, grad_value, grad_bias, grad_sinks;  // contiguous, in the sizes of their tensors
};

inline uint32_t low(uint64_t x) { return uint32_t(x); }
inline uint32_t high(uint64_t x) { return uint32_t(x >> 32); }

// The 16-bit number that decides on a weight: Philox4x32-10 under the seed at (floor(j / 8), i, h, b).
inline uint32_t dropout_number(uint64_t seed, int64_t b, int64_t h, int64_t i, int64_t j) {
  const int64_t within = ((j % 8) + 8) % 8;
  uint32_t c[4] = {low(uint64_t((j - within) / 8)), low(uint64_t(i)), low(uint64_t(h)), low(uint64_t(b))};
  uint32_t key[2] = {low(seed), high(seed)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t(0xD2511F53u) * c[0], second = uint64_t(0xCD9E8D57u) * c[2];
    const uint32_t next[4] = {high(second) ^ c[1] ^ key[0], low(second), high(first) ^ c[3] ^ key[1], low(first)};
    std::copy(next, next + 4, c);
    key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u;
  }
  return (c[within / 2] >> (16 * (within % 2))) & 0xFFFF;
}

// Which pairs (i, j) a member's schedules hold, (L, S).
inline std::vector<uint8_t> pairs_of(const qkv::Member& member, int64_t queries, int64_t keys) {
  std::vector<uint8_t> seen(size_t(queries * keys));
  for (int64_t n = 0; n < member.count; ++n) {
    const qkv::Part& part = member.parts[n];
    const qkv::Schedule& s = part.schedule;
    const auto tile = [&](int64_t row, int64_t col, const uint64_t* words) {
      for (int64_t k = 0; k < TILE && col * TILE + k < part.key_count; ++k) {
        for (int64_t t = 0; t < TILE && row * TILE + t < part.query_count; ++t) {
          if (words && !(words[k] >> t & 1)) continue;
          const int64_t i = part.query_rows ? part.query_rows[row * TILE + t] : row * TILE + t;
          const int64_t j = part.key_rows ? part.key_rows[col * TILE + k] : col * TILE + k;
          if (i >= 0 && j >= 0) seen[size_t(i * keys + j)] = 1;
        }
      }
    };
    for (int64_t row = 0; row < s.rows; ++row) {
      for (int32_t r = s.row_ptr[row]; r < s.row_ptr[row + 1]; ++r) {
        for (int32_t col = s.runs[2 * r]; col < s.runs[2 * r + 1]; ++col) tile(row, col, nullptr);
      }
      for (int32_t r = s.partial_ptr[row]; r < s.partial_ptr[row + 1]; ++r) {
        tile(row, s.partial[2 * r], s.masks + TILE * s.partial[2 * r + 1]);
      }
    }
  }
  return seen;
}

class Reference {
 public:
  explicit Reference(const Case& made) : made_(made), p_(made.problem) {
    for (int64_t m = 0; m < p_.plan.count; ++m) {  // packed: a member for each batch row
      pairs_.push_back(pairs_of(p_.plan.members[m], made.queries(m), made.keys(m)));
    }
    const int64_t rows = made.query.size[0] * p_.heads * made.query.size[2];
    const int64_t keys = made.key.size[0] * p_.kv_heads * made.key.size[2];
    truth_.output.resize(size_t(rows * p_.value_dim));
    for (Sums* sums : {&truth_.lse, &truth_.max_scores, &truth_.entropy}) sums->resize(size_t(rows));
    truth_.grad_query.resize(size_t(rows * p_.head_dim));
    truth_.grad_key.resize(size_t(keys * p_.head_dim));
    truth_.grad_value.resize(size_t(keys * p_.value_dim));
    truth_.grad_bias.resize(size_t(made.bias.count()));
    truth_.grad_sinks.resize(size_t(made.sinks.count()));
    for (int64_t b = 0; b < p_.batch; ++b) {
      for (int64_t h = 0; h < p_.heads; ++h) {
        for (int64_t i = 0; i < made.queries(b); ++i) row(b, h, i);
      }
    }
  }

  const Truth& truth() const { return truth_; }

  // Whether the pattern and the bias let query i of (b, h) see key j.
  bool sees(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const int64_t at = b * p_.plan.index_batch_stride + h * p_.plan.index_head_stride;
    return pairs_[size_t(p_.plan.index[at])][size_t(i * made_.keys(b) + j)] && bias(b, h, i, j) > -INF;
  }

 private:
  struct Pair {
    int64_t j;
    double score, capped, size;  // of the score; `capped` is tanh(raw / softcap)
    double weight, keep;         // keep: 0, or what a kept weight is multiplied by
  };

  int64_t group(int64_t h) const { return h / (p_.heads / p_.kv_heads); }
  double of_query(const Tensor& tensor, int64_t b, int64_t h, int64_t i, int64_t c) const {
    const auto [at, row] = made_.query_place(b, i);
    return tensor.at(at, h, row, c);
  }
  double of_key(const Tensor& tensor, int64_t b, int64_t h, int64_t j, int64_t c) const {
    const auto [at, row] = made_.key_place(b, j);
    return tensor.at(at, group(h), row, c);
  }
  int64_t query_position(int64_t b, int64_t i) const { return p_.query_start[b * p_.query_start_stride] + i; }
  int64_t key_position(int64_t b, int64_t j) const { return p_.key_start[b * p_.key_start_stride] + j; }
  int64_t distance(int64_t b, int64_t i, int64_t j) const { return key_position(b, j) - query_position(b, i); }

  // Where the number that a pair's bias comes from stands.
  std::array<int64_t, 4> bias_place(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const int64_t* size = made_.bias.size;
    if (p_.bias.kind == BiasKind::tensor) return {b % size[0], h % size[1], i % size[2], j % size[3]};
    if (p_.bias.kind == BiasKind::alibi) return {h, 0, 0, 0};
    const int64_t radius = size[1] / 2;
    return {h, std::max(-radius, std::min(radius, distance(b, i, j))) + radius, 0, 0};
  }

  // What the number is multiplied by.
  double bias_factor(int64_t b, int64_t i, int64_t j) const {
    return p_.bias.kind == BiasKind::alibi ? -std::abs(double(distance(b, i, j))) : 1;
  }

  double bias(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (p_.bias.kind == BiasKind::none) return 0;
    const auto at = bias_place(b, h, i, j);
    return made_.bias.at(at[0], at[1], at[2], at[3]) * bias_factor(b, i, j);
  }

  Pair pair(int64_t b, int64_t h, int64_t i, int64_t j) const {
    Pair found = {j, 0, 0, 0, 0, 1};
    for (int64_t c = 0; c < p_.head_dim; ++c) {
      const double term = p_.scale * of_query(made_.query, b, h, i, c) * of_key(made_.key, b, h, j, c);
      found.score += term, found.size += std::abs(term);
    }
    if (p_.softcap > 0) {
      found.capped = std::tanh(found.score / p_.softcap);
      found.score = p_.softcap * found.capped;
    }
    const double bias = this->bias(b, h, i, j);
    found.score += bias, found.size += std::abs(bias);
    if (p_.dropout_threshold) {
      const uint32_t number = dropout_number(made_.seed, p_.batch_origin + b, p_.head_origin + h,
                                             query_position(b, i), key_position(b, j));
      found.keep = number < p_.dropout_threshold ? 0 : 65536.0 / (65536 - p_.dropout_threshold);
    }
    return found;
  }

  void row(int64_t b, int64_t h, int64_t i) {
    std::vector<Pair> pairs;
    const double sink = made_.sinks.memory ? made_.sinks.at(h, 0, 0, 0) : -INF;
    double top = -INF, largest = sink > -INF ? std::abs(sink) : 0;
    for (int64_t j = 0; j < made_.keys(b); ++j) {
      if (!sees(b, h, i, j)) continue;
      pairs.push_back(pair(b, h, i, j));
      top = std::max(top, pairs.back().score);
      largest = std::max(largest, pairs.back().size);
    }
    const double shift = std::max(top, sink), reach = 1 + largest;
    const int64_t at = made_.query_row(b, h, i);
    truth_.max_scores[size_t(at)] = {top, reach};
    truth_.lse[size_t(at)] = {-INF, reach};
    if (shift == -INF) return;
    double total = std::exp(sink - shift);
    for (const Pair& one : pairs) total += std::exp(one.score - shift);
    const double lse = shift + std::log(total);
    truth_.lse[size_t(at)] = {lse, reach + std::abs(lse)};
    for (Pair& one : pairs) {
      one.weight = std::exp(one.score - shift) / total;
      const double surprise = std::abs(lse) + std::abs(one.score) + 1;
      truth_.entropy[size_t(at)].add(one.weight * (lse - one.score), reach * one.weight * surprise);
    }
    truth_.entropy[size_t(at)].size += 1;
    output(b, h, at, pairs, reach);
    gradients(b, h, i, at, pairs, reach, std::exp(sink - shift) / total);
  }

  void output(int64_t b, int64_t h, int64_t at, const std::vector<Pair>& pairs, double reach) {
    for (const Pair& one : pairs) {
      for (int64_t c = 0; c < p_.value_dim; ++c) {
        const double term = one.weight * one.keep * of_key(made_.value, b, h, one.j, c);
        truth_.output[size_t(at * p_.value_dim + c)].add(term, reach * std::abs(term));
      }
    }
  }

  void gradients(int64_t b, int64_t h, int64_t i, int64_t at, const std::vector<Pair>& pairs, double reach,
                 double sink_weight) {
    Sum centre;  // dO · O less the gradient of lse
    for (int64_t c = 0; c < p_.value_dim; ++c) {
      const double grad = of_query(made_.grad_output, b, h, i, c);
      const Sum& out = truth_.output[size_t(at * p_.value_dim + c)];
      centre.add(grad * out.value, std::abs(grad) * out.size / reach);
    }
    const double grad_lse = made_.grad_lse.memory ? load(made_.grad_lse.type, made_.grad_lse.data(), at) : 0;
    centre.add(-grad_lse, std::abs(grad_lse));
    if (made_.sinks.memory) {
      truth_.grad_sinks[size_t(h)].add(-sink_weight * centre.value, reach * sink_weight * centre.size);
    }
    for (const Pair& one : pairs) pair_gradients(b, h, i, at, one, centre, reach);
  }

  void pair_gradients(int64_t b, int64_t h, int64_t i, int64_t at, const Pair& one, const Sum& centre, double reach) {
    const int64_t key = made_.paged() ? -1 : made_.key_row(b, group(h), one.j);  // those in pages have no gradients
    Sum grad;  // of the score
    for (int64_t c = 0; c < p_.value_dim; ++c) {
      const double grad_output = of_query(made_.grad_output, b, h, i, c);
      const double term = one.keep * grad_output * of_key(made_.value, b, h, one.j, c);
      grad.add(term, std::abs(term));
      const double share = one.weight * one.keep * grad_output;
      if (key >= 0) truth_.grad_value[size_t(key * p_.value_dim + c)].add(share, reach * std::abs(share));
    }
    grad = {one.weight * (grad.value - centre.value), reach * one.weight * (grad.size + centre.size)};
    if (p_.bias.kind != BiasKind::none) {
      const auto place = bias_place(b, h, i, one.j);
      const int64_t* size = made_.bias.size;
      const int64_t n = ((place[0] * size[1] + place[1]) * size[2] + place[2]) * size[3] + place[3];
      const double factor = bias_factor(b, i, one.j);
      truth_.grad_bias[size_t(n)].add(grad.value * factor, grad.size * std::abs(factor));
    }
    if (p_.softcap > 0) {
      grad = {grad.value * (1 - one.capped * one.capped), grad.size * (1 + 2 * one.size / p_.softcap)};
    }
    for (int64_t c = 0; c < p_.head_dim; ++c) {
      const double k = of_key(made_.key, b, h, one.j, c), q = of_query(made_.query, b, h, i, c);
      const double size = std::abs(p_.scale) * grad.size;
      truth_.grad_query[size_t(at * p_.head_dim + c)].add(p_.scale * grad.value * k, size * std::abs(k));
      if (key >= 0) truth_.grad_key[size_t(key * p_.head_dim + c)].add(p_.scale * grad.value * q, size * std::abs(q));
    }
  }

  const Case& made_;
  const Problem& p_;
  std::vector<std::vector<uint8_t>> pairs_;
  Truth truth_;
};

}  // namespace driver
