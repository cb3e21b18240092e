// Random norms over rows, their gradients from the definition in double, and their calls.
#pragma once

#include <sstream>

#include "../../../csrc/beside.h"
#include "activations.h"
#include "rows.h"

namespace driver {

using qkv::Activation;
using qkv::Norm;

class NormQuestion {
 public:
  explicit NormQuestion(uint64_t seed) : random_(seed) {
    Norm& p = problem_;
    p.type = random_.chance(0.4) ? Type::float32 : Type(random_.between(1, 3));
    p.gate_type = type_beside(random_, p.type), p.weight_type = type_beside(random_, p.type);
    p.activation = Activation(random_.below(3));
    p.gate_first = random_.chance(0.5), p.mean = random_.chance(0.6);
    p.eps = random_.chance(0.5) ? 1e-6 : 0.1;
    sizes();
    x_ = in_rows(random_, p.type, p.outer, 1, p.inner, p.width);
    grad_output_ = in_rows(random_, p.type, p.outer, 1, p.inner, p.width);
    if (gated()) gate_ = in_rows(random_, p.gate_type, p.outer, 1, p.inner, p.width);
    const bool weighs = random_.chance(0.7);
    p.weight_rows = weighs && random_.chance(0.5) ? random_.between(1, 5) : 1;
    if (weighs) weight_ = contiguous(p.weight_type, 1, 1, p.weight_rows, p.width);
    for (Tensor* tensor : {&x_, &grad_output_, &gate_, &weight_}) fill(*tensor, [&] { return random_.normal(); });
    grad_x_ = random_.chance(0.8), grad_gate_ = gated() && random_.chance(0.8);
    grad_weight_ = weighs && random_.chance(0.8);
    p.x_stride[0] = x_.stride[0], p.x_stride[1] = x_.stride[2];
    p.gate_stride[0] = gate_.stride[0], p.gate_stride[1] = gate_.stride[2];
    p.x = x_.data(), p.gate = gate_.data(), p.weight = weight_.data();
  }

  std::string text() const {
    const Norm& p = problem_;
    std::ostringstream line;
    line << "norm, types " << int(p.type) << " " << int(p.gate_type) << " " << int(p.weight_type) << ", rows "
         << p.outer << " x " << p.inner << ", W" << p.width << ", activation " << int(p.activation)
         << (p.gate_first ? ", gate first" : "") << (p.mean ? ", mean" : "") << ", weight "
         << (weight_.bytes ? p.weight_rows : 0) << ", eps " << p.eps;
    return line.str();
  }

  void fill_inputs_with_nan() {
    for (Tensor* tensor : {&x_, &grad_output_, &gate_, &weight_}) fill_with_nan(*tensor);
  }

  Truth truth() const {
    const Norm& p = problem_;
    Truth truth;
    const auto numbers = size_t(p.outer * p.inner * p.width);
    for (const char* name : {"output", "grad_x", "grad_gate"}) truth[name].assign(numbers, 0);
    truth["grad_weight"].assign(size_t(p.weight_rows * p.width), 0);
    for (int64_t row = 0; row < p.outer * p.inner; ++row) one(row, truth);
    return truth;
  }

  Outcome run(const How& how) const {
    Norm p = problem_;
    Outcome made;
    p.output = made.add("output", contiguous(p.type, p.outer, 1, p.inner, p.width)).data();
    made.status = qkv::norm(p, how.run());
    p.output = nullptr;
    if (made.status != qkv::Status::ok || how.forward_alone) return made;
    qkv::NormGradients grads = {
        grad_output_.data(), {grad_output_.stride[0], grad_output_.stride[2]}, nullptr, nullptr, nullptr};
    const Type wide = computing(p.type);
    if (grad_x_) grads.x = made.add("grad_x", contiguous(p.type, p.outer, 1, p.inner, p.width)).data();
    if (grad_gate_) grads.gate = made.add("grad_gate", contiguous(p.gate_type, p.outer, 1, p.inner, p.width)).data();
    if (grad_weight_) grads.weight = made.add("grad_weight", contiguous(wide, 1, 1, p.weight_rows, p.width)).data();
    made.status = qkv::norm_backward(p, grads, how.run());
    return made;
  }

 private:
  bool gated() const { return problem_.activation != Activation::none; }

  void sizes() {
    Norm& p = problem_;
    const int64_t widths[] = {4, 16, 31, 32, 64, 128, 256, 700};
    const int64_t limit = random_.chance(0.2) ? 100000 : 10000;
    do {
      p.outer = random_.chance(0.3) ? random_.between(0, 300) : random_.between(0, 5);
      p.inner = random_.between(0, 6);
      p.width = random_.chance(0.6) ? random_.between(1, 140) : random_.pick(widths);
    } while (p.outer * p.inner * p.width > limit);
  }

  double act(double x) const {
    if (!gated()) return 1;
    return problem_.activation == Activation::silu ? silu_of(x) : sigmoid_of(x);
  }
  double slope(double x) const {
    if (!gated()) return 0;
    return problem_.activation == Activation::silu ? silu_slope_of(x) : sigmoid_slope_of(x);
  }

  // One row. With a what is normed and n = a r: y = n · weight · act, where act is 1 if the gate came first.
  void one(int64_t row, Truth& truth) const {
    const Norm& p = problem_;
    const int64_t o = row / p.inner, i = row % p.inner, place = row * p.width, own = row % p.weight_rows;
    const auto width = size_t(p.width);
    Numbers x(width), gate(width), weight(width), normed(width), grad(width);
    double squares = 0, product = 0;
    for (size_t c = 0; c < width; ++c) {
      x[c] = x_.at(o, 0, i, int64_t(c)), gate[c] = gated() ? gate_.at(o, 0, i, int64_t(c)) : 0;
      weight[c] = weight_.bytes ? weight_.at(0, 0, own, int64_t(c)) : 1;
      normed[c] = p.gate_first ? x[c] * act(gate[c]) : x[c];
      squares += normed[c] * normed[c];
    }
    const double share = p.mean ? 1 / double(p.width) : 1, r = 1 / std::sqrt(squares * share + p.eps);
    for (size_t c = 0; c < width; ++c) {
      const double after = p.gate_first ? 1 : act(gate[c]), given = grad_output_.at(o, 0, i, int64_t(c));
      normed[c] *= r;
      truth["output"][size_t(place) + c] = normed[c] * weight[c] * after;
      truth["grad_weight"][size_t(own) * width + c] += given * normed[c] * after;
      if (!p.gate_first) truth["grad_gate"][size_t(place) + c] = given * normed[c] * weight[c] * slope(gate[c]);
      grad[c] = given * weight[c] * after;
      product += grad[c] * normed[c];
    }
    for (size_t c = 0; c < width; ++c) {
      const double inner = r * (grad[c] - normed[c] * share * product);  // of a
      truth["grad_x"][size_t(place) + c] = p.gate_first ? inner * act(gate[c]) : inner;
      if (p.gate_first) truth["grad_gate"][size_t(place) + c] = inner * x[c] * slope(gate[c]);
    }
  }

  Random random_;
  Norm problem_ = {};
  Tensor x_, gate_, weight_, grad_output_;
  bool grad_x_ = false, grad_gate_ = false, grad_weight_ = false;  // wanted
};

}  // namespace driver
