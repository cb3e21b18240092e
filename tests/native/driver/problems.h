// Random attention calls: everything about one follows from its seed and the limit of its size.
#pragma once

#include <string>
#include <utility>

#include "schedules.h"

namespace driver {

using qkv::BiasKind;
using qkv::Problem;

// One call with its data, which it owns; `problem` points into it.
struct Case {
  Problem problem = {};
  Tensor query, key, value, bias, sinks, grad_output, grad_lse;
  Exact<int64_t> query_start, key_start, packed_queries, packed_keys;
  Exact<int32_t> pages;
  PlanTables plan;
  uint64_t seed = 0;
  bool lse = false, max_scores = false, entropy = false;                                     // results wanted
  bool grad_query = false, grad_key = false, grad_value = false, grad_bias = false, grad_sinks = false;

  bool packed() const { return packed_queries.size() != 0; }
  bool paged() const { return pages.size() != 0; }
  int64_t queries(int64_t b) const { return packed() ? length(packed_queries, b) : problem.queries; }
  int64_t keys(int64_t b) const { return packed() ? length(packed_keys, b) : problem.keys; }

  // Where query i and key j of batch row b stand in their tensors: axes 0 and 2.
  std::pair<int64_t, int64_t> query_place(int64_t b, int64_t i) const {
    return packed() ? std::make_pair(int64_t(0), packed_queries.data()[b] + i) : std::make_pair(b, i);
  }
  std::pair<int64_t, int64_t> key_place(int64_t b, int64_t j) const {
    if (packed()) return {0, packed_keys.data()[b] + j};
    const int64_t size = problem.pages.size;
    return paged() ? std::make_pair(int64_t(0), pages.data()[b * problem.pages.stride + j / size] * size + j % size)
                   : std::make_pair(b, j);
  }

  // Among the rows of a contiguous result of queries, and of gradients of keys.
  int64_t query_row(int64_t b, int64_t h, int64_t i) const {
    return packed() ? h * query.size[2] + packed_queries.data()[b] + i : (b * problem.heads + h) * problem.queries + i;
  }
  int64_t key_row(int64_t b, int64_t g, int64_t j) const {
    return packed() ? g * key.size[2] + packed_keys.data()[b] + j : (b * problem.kv_heads + g) * problem.keys + j;
  }

  std::string text() const {
    const Problem& p = problem;
    const char* bias_names[] = {"no bias", "tensor", "alibi", "relative"};
    const char* type_names[] = {"float32", "float64", "float16", "bfloat16"};
    std::string text = type_names[int(p.type)];
    if (p.output_type != p.type) text += std::string(" to ") + type_names[int(p.output_type)];
    if (packed()) text += ", packed";
    if (paged()) text += ", pages of " + std::to_string(p.pages.size);
    const std::pair<const char*, int64_t> sizes[] = {{"B", p.batch},   {"H", p.heads},    {"G", p.kv_heads},
                                                     {"L", p.queries}, {"S", p.keys},     {"D", p.head_dim},
                                                     {"V", p.value_dim}};
    for (const auto& [name, size] : sizes) text += std::string(" ") + name + std::to_string(size);
    text += std::string(", ") + bias_names[int(p.bias.kind)];
    if (p.softcap > 0) text += ", softcap";
    if (sinks.memory) text += ", sinks";
    if (p.dropout_threshold) text += ", dropout";
    text += ", parts";
    for (int64_t m = 0; m < p.plan.count; ++m) text += " " + std::to_string(p.plan.members[m].count);
    return text;
  }

 private:
  static int64_t length(const Exact<int64_t>& begin, int64_t b) { return begin.data()[b + 1] - begin.data()[b]; }
};

class CaseMaker {
 public:
  CaseMaker(uint64_t seed, int64_t limit) : random_(seed), limit_(limit) {}

  Case make() {
    Case made;
    Problem& p = made.problem;
    p.type = random_.chance(0.4) ? Type::float32 : Type(random_.between(1, 3));
    p.output_type = random_.chance(0.3) ? computing(p.type) : p.type;
    sizes(p);
    const double form = random_.uniform();
    if (form < 0.2 && p.batch) pack(made);
    if (form > 0.8) put_in_pages(made);
    const double scales[] = {1 / std::sqrt(double(p.head_dim)), 0.37, -0.2, 0.0};
    p.scale = scales[random_.chance(0.7) ? 0 : random_.below(4)];
    p.softcap = random_.chance(0.25) ? 0.5 + 4 * random_.uniform() : 0;
    inputs(made);
    bias(made);
    dropout(made);
    made.query_start = starts(p);
    made.key_start = starts(p);
    p.query_start = made.query_start.data();
    p.key_start = made.key_start.data();
    p.query_start_stride = made.query_start.size() > 1;
    p.key_start_stride = made.key_start.size() > 1;
    if (made.packed()) {
      const auto sizes = [&](int64_t b) { return std::make_pair(made.queries(b), made.keys(b)); };
      p.plan = packed_plan(random_, made.plan, p.batch, sizes);
    } else {
      p.plan = random_plan(random_, made.plan, p.batch, p.heads, p.queries, p.keys);
    }
    wishes(made);
    return made;
  }

 private:
  void sizes(Problem& p) {
    if (random_.chance(0.1)) return long_sizes(p);
    const int64_t limit = random_.chance(0.1) ? 8 * limit_ : limit_;
    const int64_t lengths[] = {0, 1, 2, 7, 63, 64, 65, 127, 129, 200};
    const int64_t widths[] = {1, 3, 8, 16, 17, 40, 64, 96, 128, 192, 256};
    do {
      p.batch = random_.chance(0.03) ? 0 : random_.between(1, 3);
      p.kv_heads = random_.between(1, 3);
      p.heads = p.kv_heads * random_.between(1, 3);
      p.queries = random_.pick(lengths);
      p.keys = random_.chance(0.4) ? p.queries : random_.pick(lengths);
      p.head_dim = random_.pick(widths);
      p.value_dim = random_.chance(0.6) ? p.head_dim : random_.pick(widths);
    } while (effort(p) > limit);
  }

  // Enough tiles for one head to be split among threads.
  void long_sizes(Problem& p) {
    const int64_t lengths[] = {1, 7, 65, 321, 600, 1100, 2500}, widths[] = {1, 3, 8};
    do {
      p.batch = p.kv_heads = 1;
      p.heads = random_.between(1, 2);
      p.queries = random_.pick(lengths);
      p.keys = random_.pick(lengths);
      p.head_dim = random_.pick(widths);
      p.value_dim = random_.pick(widths);
    } while (effort(p) > 3 * limit_);
  }

  static int64_t effort(const Problem& p) {
    return p.batch * p.heads * p.queries * p.keys * (p.head_dim + p.value_dim);
  }

  // Batch rows of their own lengths, one of them the longest.
  void pack(Case& made) {
    Problem& p = made.problem;
    const auto begins = [&](int64_t longest) {
      std::vector<int64_t> found = {0};
      const int64_t whole = random_.below(p.batch);
      for (int64_t b = 0; b < p.batch; ++b) {
        const int64_t length = b == whole || random_.chance(0.3) ? longest : random_.between(0, longest);
        found.push_back(found.back() + length);
      }
      return Exact<int64_t>(found);
    };
    made.packed_queries = begins(p.queries), made.packed_keys = begins(p.keys);
    p.packing = {made.packed_queries.data(), made.packed_keys.data()};
  }

  // Pages in any order, some of nobody.
  void put_in_pages(Case& made) {
    Problem& p = made.problem;
    const int64_t sizes[] = {16, 48, 64, 128};
    p.pages.size = random_.pick(sizes), p.pages.stride = (p.keys + p.pages.size - 1) / p.pages.size;
    std::vector<int32_t> table(size_t(p.batch * p.pages.stride + random_.below(3)));
    for (size_t n = 0; n < table.size(); ++n) table[n] = int32_t(n);
    random_.shuffle(table);
    table.resize(size_t(p.batch * p.pages.stride));
    made.pages = Exact<int32_t>(table);
    p.pages.table = made.pages.data();
  }

  void inputs(Case& made) {
    Problem& p = made.problem;
    const int64_t batch = made.packed() ? 1 : p.batch, key_batch = made.packed() || made.paged() ? 1 : p.batch;
    const int64_t queries = made.packed() ? made.packed_queries.data()[p.batch] : p.queries;
    int64_t keys = made.packed() ? made.packed_keys.data()[p.batch] : p.keys;
    if (made.paged()) {
      const int32_t* const end = made.pages.data() + made.pages.size();
      keys = (*std::max_element(made.pages.data(), end) + 1) * p.pages.size;
    }
    made.query = in_some_layout(random_, p.type, batch, p.heads, queries, p.head_dim);
    made.key = in_some_layout(random_, p.type, key_batch, p.kv_heads, keys, p.head_dim);
    made.value = in_some_layout(random_, p.type, key_batch, p.kv_heads, keys, p.value_dim);
    made.grad_output = in_some_layout(random_, p.output_type, batch, p.heads, queries, p.value_dim);
    for (Tensor* tensor : {&made.query, &made.key, &made.value, &made.grad_output}) fill(*tensor, 1);
    std::copy(made.query.stride, made.query.stride + 4, p.query_stride);
    std::copy(made.key.stride, made.key.stride + 4, p.key_stride);
    std::copy(made.value.stride, made.value.stride + 4, p.value_stride);
    if (made.paged()) p.key_stride[0] = p.value_stride[0] = 0;
    const Type wide = computing(p.type);
    if (random_.chance(0.5)) {
      made.grad_lse = contiguous(wide, batch, p.heads, queries, 1);
      fill(made.grad_lse, 1);
    }
    if (random_.chance(0.25)) {
      made.sinks = contiguous(wide, p.heads, 1, 1, 1);
      fill(made.sinks, 2, 0.1);
    }
  }

  // Normal numbers, some of them -inf.
  void fill(Tensor& tensor, double deviation, double minus_infinity = 0) {
    tensor.each([&](int64_t a, int64_t b, int64_t c, int64_t d) {
      tensor.set(a, b, c, d, random_.chance(minus_infinity) ? -INF : deviation * random_.normal());
    });
  }

  void bias(Case& made) {
    Problem& p = made.problem;
    const Type type = random_.chance(0.7) ? p.type : Type(random_.below(4));
    const auto some = [&](int64_t size) { return random_.chance(0.4) ? 1 : size; };
    p.bias.kind = random_.chance(0.4) ? BiasKind::none : BiasKind(random_.between(1, 3));
    if (p.bias.kind == BiasKind::none) return;
    if (p.bias.kind == BiasKind::tensor) {
      made.bias = in_some_layout(random_, type, some(p.batch), some(p.heads), some(p.queries), some(p.keys));
      fill(made.bias, 1, random_.chance(0.5) ? 0.1 : 0);
    } else if (p.bias.kind == BiasKind::alibi) {
      made.bias = contiguous(computing(p.type), p.heads, 1, 1, 1);
      fill(made.bias, 0.1);
    } else {
      made.bias = contiguous(computing(p.type), p.heads, 2 * random_.below(random_.chance(0.5) ? 5 : 90) + 1, 1, 1);
      fill(made.bias, 1, random_.chance(0.3) ? 0.1 : 0);
    }
    p.bias.type = made.bias.type;
    for (int axis = 0; axis < 4; ++axis) {
      p.bias.size[axis] = made.bias.size[axis];
      p.bias.stride[axis] = made.bias.size[axis] == 1 ? 0 : made.bias.stride[axis];
    }
  }

  void dropout(Case& made) {
    Problem& p = made.problem;
    made.seed = random_.next();
    const int64_t thresholds[] = {1, 6554, 32768, 60000, 65535};
    if (random_.chance(0.3)) p.dropout_threshold = uint32_t(random_.pick(thresholds));
    if (p.type == Type::float16) p.dropout_threshold = std::min(p.dropout_threshold, 60000u);  // within its range
    if (random_.chance(0.2)) {
      p.batch_origin = random_.between(0, 5000000000);
      p.head_origin = random_.between(0, 70);
    }
  }

  // Absolute positions of row 0: one for all batch rows or one each.
  Exact<int64_t> starts(const Problem& p) {
    std::vector<int64_t> found(size_t(random_.chance(0.3) && p.batch ? p.batch : 1));
    for (int64_t& start : found) start = random_.chance(0.5) ? 0 : random_.between(-300, 300);
    // Beyond 32 bits; a slope times as much leaves no digit for the rest of a score.
    if (random_.chance(0.05) && p.bias.kind != BiasKind::alibi) found[0] = 5000000000;
    return Exact<int64_t>(found);
  }

  void wishes(Case& made) {
    for (bool* wish : {&made.lse, &made.max_scores, &made.entropy, &made.grad_query, &made.grad_key, &made.grad_value,
                       &made.grad_bias, &made.grad_sinks}) {
      *wish = random_.chance(0.8);
    }
    made.grad_bias = made.grad_bias && made.problem.bias.kind != BiasKind::none;
    made.grad_sinks = made.grad_sinks && made.sinks.memory;
    if (made.paged()) made.grad_key = made.grad_value = false;
  }

  Random random_;
  int64_t limit_;
};

}  // namespace driver
