// Random recurrences: everything about one follows from its seed.
#pragma once

#include <sstream>

#include "../../../csrc/linear.h"
#include "rows.h"

namespace driver {

using qkv::Feature;
using qkv::Gates;
using qkv::Recurrence;
using qkv::Status;
using qkv::Stride;

inline Stride stride_of(const Tensor& tensor) { return {tensor.stride[0], tensor.stride[1], tensor.stride[2]}; }

// One call with its data, which it owns; `problem` points into it.
struct RecurrenceCase {
  Recurrence problem = {};
  Exact<int64_t> starts;
  Tensor query, key, value, gate, beta, before, grad_output, grad_after;
  bool grad_query = false, grad_key = false, grad_value = false, grad_gate = false, grad_beta = false;  // wanted
  bool grad_before = false;
  uint64_t layouts = 0;  // of results

  bool packed() const { return starts.size() != 0; }
  int64_t batch() const { return packed() ? 1 : problem.sequences; }
  int64_t tokens() const { return packed() ? starts.data()[problem.sequences] : problem.length; }  // of a row
  int64_t first(int64_t n) const { return packed() ? starts.data()[n] : 0; }
  int64_t count(int64_t n) const { return packed() ? starts.data()[n + 1] - starts.data()[n] : problem.length; }
  int64_t width() const { return problem.value_dim + problem.normalize; }
  int64_t chunks() const {
    int64_t all = 0;
    for (int64_t n = 0; n < problem.sequences; ++n) all += (count(n) + 63) / 64;
    return all;
  }

  void fill_inputs_with_nan() {
    for (Tensor* tensor : {&query, &key, &value, &gate, &beta, &before, &grad_output, &grad_after}) {
      fill_with_nan(*tensor);
    }
  }

  std::string text() const {
    const char* const types[] = {"float32", "float64", "float16", "bfloat16"};
    const Recurrence& p = problem;
    std::ostringstream line;
    line << types[int(p.type)] << " N" << p.sequences << " H" << p.heads << " K" << p.key_heads << " D" << p.key_dim
         << " V" << p.value_dim << ", tokens";
    for (int64_t n = 0; n < p.sequences; ++n) line << " " << count(n);
    line << (packed() ? ", packed" : "") << ", gates " << int(p.gates) << ", feature " << int(p.feature)
         << (p.delta ? ", delta" : "") << (p.normalize ? ", normalize" : "") << ", scale " << p.scale;
    return line.str();
  }
};

class RecurrenceMaker {
 public:
  explicit RecurrenceMaker(uint64_t seed) : random_(seed) {}

  RecurrenceCase make() {
    RecurrenceCase made;
    Recurrence& p = made.problem;
    p.type = random_.chance(0.4) ? Type::float32 : Type(random_.between(1, 3));
    p.gate_type = type_beside(random_, p.type), p.beta_type = type_beside(random_, p.type);
    kind(p);
    sizes(made);
    const double scales[] = {1, 1 / std::sqrt(double(p.key_dim)), -0.7};
    p.scale = scales[random_.below(3)];
    p.output_type = random_.chance(0.3) || p.normalize ? computing(p.type) : p.type;
    inputs(made);
    gates(made);
    states(made);
    for (bool* wish : {&made.grad_query, &made.grad_key, &made.grad_value, &made.grad_gate, &made.grad_beta,
                       &made.grad_before}) {
      *wish = random_.chance(0.8);
    }
    made.grad_gate = made.grad_gate && p.gates != Gates::none;
    made.grad_beta = made.grad_beta && p.delta;
    made.layouts = random_.next();
    return made;
  }

 private:
  void kind(Recurrence& p) {
    p.gates = Gates(random_.below(3));
    p.delta = random_.chance(0.5), p.normalize = !p.delta && random_.chance(0.4);
    p.feature = Feature(random_.below(4));
    if (p.delta && p.feature == Feature::elu) p.feature = Feature::none;  // keys so large that no rule is stable
  }

  void sizes(RecurrenceCase& made) {
    Recurrence& p = made.problem;
    const int64_t lengths[] = {0, 1, 2, 3, 4, 5, 7, 8, 9, 20, 63, 64, 65, 66, 128, 131};
    const int64_t widths[] = {1, 2, 4, 8, 16, 17, 31, 32, 33, 48, 64, 65, 96, 128, 129};
    const auto width = [&] { return random_.chance(0.5) ? random_.between(1, 140) : random_.pick(widths); };
    const int64_t limit = random_.chance(0.1) ? 1500000 : 200000;
    do {
      p.sequences = random_.between(1, 4), p.key_heads = random_.between(1, 3);
      p.heads = p.key_heads * random_.between(1, 3);
      p.length = random_.pick(lengths), p.key_dim = width(), p.value_dim = width();
      made.starts = Exact<int64_t>();
      if (random_.chance(0.35)) made.starts = packed(random_, p.sequences, [&] { return random_.pick(lengths); });
      p.starts = made.starts.data();
      if (p.starts) p.length = made.tokens();
    } while (made.batch() * made.tokens() * p.heads * p.key_dim * p.value_dim > limit);
  }

  // Features that are summed by a normaliser are positive: no denominator is near zero, though some are zero.
  void inputs(RecurrenceCase& made) {
    const Recurrence& p = made.problem;
    const double size = 0.8 / std::sqrt(double(p.key_dim));
    const auto normal = [&](double factor, double least) {
      return [=] { return p.normalize ? least + factor * std::abs(random_.normal()) : factor * random_.normal(); };
    };
    made.query = in_rows(random_, p.type, made.batch(), p.key_heads, made.tokens(), p.key_dim);
    made.key = in_rows(random_, p.type, made.batch(), p.key_heads, made.tokens(), p.key_dim);
    made.value = in_rows(random_, p.type, made.batch(), p.heads, made.tokens(), p.value_dim);
    made.grad_output = in_rows(random_, p.type, made.batch(), p.heads, made.tokens(), p.value_dim);
    fill(made.query, normal(0.8, 0.3));
    fill(made.key, normal(size, 0.2));
    fill(made.value, [&] { return random_.normal(); });
    fill(made.grad_output, [&] { return random_.normal(); });
    if (!p.normalize || made.tokens() == 0) return;
    for (int64_t d = 0; d < p.key_dim; ++d) made.query.set(0, 0, made.tokens() / 2, d, 0);
  }

  void gates(RecurrenceCase& made) {
    const Recurrence& p = made.problem;
    if (p.gates != Gates::none) {
      const int64_t width = p.gates == Gates::vector ? p.key_dim : 1;
      made.gate = in_rows(random_, p.gate_type, made.batch(), p.heads, made.tokens(), width);
      const double size = random_.chance(0.2) ? 60 : 0.3, resets = random_.chance(0.2) ? 0.1 : 0;
      fill(made.gate, [&] { return random_.chance(resets) ? -INF : -size * std::abs(random_.normal()); });
    }
    if (p.delta) {
      made.beta = in_rows(random_, p.beta_type, made.batch(), p.heads, made.tokens(), 1);
      fill(made.beta, [&] { return random_.uniform(); });
    }
  }

  void states(RecurrenceCase& made) {
    Recurrence& p = made.problem;
    const Type wide = computing(p.type);
    for (Tensor* tensor : {&made.before, &made.grad_after}) {
      if (random_.chance(0.35)) continue;
      *tensor = contiguous(wide, p.sequences, p.heads, p.key_dim, made.width());
      const bool positive = p.normalize && tensor == &made.before;
      fill(*tensor, [&] { return positive ? 0.1 + std::abs(random_.normal()) : 0.5 * random_.normal(); });
    }
    p.query = stride_of(made.query), p.key = stride_of(made.key), p.value = stride_of(made.value);
    p.gate = stride_of(made.gate), p.beta = stride_of(made.beta);
  }

  Random random_;
};

}  // namespace driver
