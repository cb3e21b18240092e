// Random attention calls: everything about one follows from its seed and the limit of its size.
#pragma once

#include <string>

#include "schedules.h"

namespace driver {

using qkv::BiasKind;
using qkv::Problem;

// One call with its data, which it owns; `problem` points into it.
struct Case {
  Problem problem = {};
  Tensor query, key, value, bias, sinks, grad_output, grad_lse;
  Exact<int64_t> query_start, key_start;
  PlanTables plan;
  uint64_t seed = 0;
  bool lse = false, max_scores = false, entropy = false;                                     // results wanted
  bool grad_query = false, grad_key = false, grad_value = false, grad_bias = false, grad_sinks = false;

  std::string text() const {
    const Problem& p = problem;
    const char* bias_names[] = {"no bias", "tensor", "alibi", "relative"};
    std::string text = p.type == Type::float64 ? "float64" : "float32";
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
};

class CaseMaker {
 public:
  CaseMaker(uint64_t seed, int64_t limit) : random_(seed), limit_(limit) {}

  Case make() {
    Case made;
    Problem& p = made.problem;
    p.type = random_.chance(0.7) ? Type::float32 : Type::float64;
    sizes(p);
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
    p.plan = random_plan(random_, made.plan, p.batch, p.heads, p.queries, p.keys);
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
    const int64_t lengths[] = {7, 65, 321, 600, 1100}, widths[] = {1, 3, 8};
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

  void inputs(Case& made) {
    Problem& p = made.problem;
    made.query = in_some_layout(random_, p.type, p.batch, p.heads, p.queries, p.head_dim);
    made.key = in_some_layout(random_, p.type, p.batch, p.kv_heads, p.keys, p.head_dim);
    made.value = in_some_layout(random_, p.type, p.batch, p.kv_heads, p.keys, p.value_dim);
    made.grad_output = in_some_layout(random_, p.type, p.batch, p.heads, p.queries, p.value_dim);
    for (Tensor* tensor : {&made.query, &made.key, &made.value, &made.grad_output}) fill(*tensor, 1);
    std::copy(made.query.stride, made.query.stride + 4, p.query_stride);
    std::copy(made.key.stride, made.key.stride + 4, p.key_stride);
    std::copy(made.value.stride, made.value.stride + 4, p.value_stride);
    if (random_.chance(0.5)) {
      made.grad_lse = contiguous(p.type, p.batch, p.heads, p.queries, 1);
      fill(made.grad_lse, 1);
    }
    if (random_.chance(0.25)) {
      made.sinks = contiguous(p.type, p.heads, 1, 1, 1);
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
      made.bias = contiguous(p.type, p.heads, 1, 1, 1);
      fill(made.bias, 0.1);
    } else {
      made.bias = contiguous(p.type, p.heads, 2 * random_.below(random_.chance(0.5) ? 5 : 90) + 1, 1, 1);
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
  }

  Random random_;
  int64_t limit_;
};

}  // namespace driver
