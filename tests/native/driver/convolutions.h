// Random short convolutions, their gradients from the definition in double, and their calls.
#pragma once

#include <sstream>

#include "../../../csrc/beside.h"
#include "activations.h"
#include "rows.h"

namespace driver {

using qkv::Convolution;

class ConvolutionQuestion {
 public:
  explicit ConvolutionQuestion(uint64_t seed) : random_(seed) {
    Convolution& p = problem_;
    p.type = random_.chance(0.4) ? Type::float32 : Type(random_.between(1, 3));
    p.weight_type = type_beside(random_, p.type);
    p.silu = random_.chance(0.6);
    sizes();
    x_ = in_rows(random_, p.type, batch(), 1, tokens(), p.channels);
    grad_output_ = in_rows(random_, p.type, batch(), 1, tokens(), p.channels);
    weight_ = contiguous(p.weight_type, 1, 1, p.channels, p.taps);
    if (random_.chance(0.6)) bias_ = contiguous(p.weight_type, 1, 1, 1, p.channels);
    if (random_.chance(0.6)) before_ = tail();
    if (random_.chance(0.6)) grad_after_ = tail();
    for (Tensor* tensor : {&x_, &grad_output_, &weight_, &bias_, &before_, &grad_after_}) {
      fill(*tensor, [&] { return random_.normal(); });
    }
    for (bool* wish : {&after_, &grad_x_, &grad_weight_, &grad_bias_, &grad_before_}) *wish = random_.chance(0.8);
    point();
  }

  std::string text() const {
    const Convolution& p = problem_;
    std::ostringstream line;
    line << "convolution, types " << int(p.type) << " " << int(p.weight_type) << ", C" << p.channels << " K" << p.taps
         << ", tokens";
    for (int64_t n = 0; n < p.sequences; ++n) line << " " << count(n);
    line << (p.starts ? ", packed" : "") << (p.silu ? ", silu" : "");
    return line.str();
  }

  void fill_inputs_with_nan() {
    for (Tensor* tensor : {&x_, &grad_output_, &weight_, &bias_, &before_, &grad_after_}) fill_with_nan(*tensor);
  }

  Truth truth() const {
    const Convolution& p = problem_;
    Truth truth;
    const auto room = [&](const char* name, int64_t rows) { truth[name].assign(size_t(rows * p.channels), 0); };
    room("output", batch() * tokens()), room("grad_x", batch() * tokens());
    room("after", p.sequences * (p.taps - 1)), room("grad_before", p.sequences * (p.taps - 1));
    room("grad_weight", p.taps), room("grad_bias", 1);
    for (int64_t n = 0; n < p.sequences; ++n) {
      for (int64_t c = 0; c < p.channels; ++c) channel(n, c, truth);
    }
    return truth;
  }

  Outcome run(const How& how) const {
    Convolution p = problem_;
    Outcome made;
    p.output = made.add("output", contiguous(p.type, batch(), 1, tokens(), p.channels)).data();
    if (after_) {
      Tensor& after = made.add("after", tail());
      if (how.in_place && before_.bytes) after = copy_of(before_), p.before = after.data();
      p.after = after.data();
    }
    made.status = qkv::convolution(p, how.run());
    p.output = p.after = nullptr, p.before = before_.data();
    if (made.status != qkv::Status::ok || how.forward_alone) return made;
    const Type wide = computing(p.type);
    qkv::ConvolutionGradients grads = {grad_output_.data(), {grad_output_.stride[0], grad_output_.stride[2]},
                                       grad_after_.data(),  nullptr, nullptr, nullptr, nullptr};
    if (grad_x_) grads.x = made.add("grad_x", contiguous(p.type, batch(), 1, tokens(), p.channels)).data();
    if (grad_weight_) grads.weight = made.add("grad_weight", contiguous(wide, 1, 1, p.channels, p.taps)).data();
    if (grad_bias_) grads.bias = made.add("grad_bias", contiguous(wide, 1, 1, 1, p.channels)).data();
    if (grad_before_) grads.before = made.add("grad_before", tail()).data();
    made.status = qkv::convolution_backward(p, grads, how.run());
    return made;
  }

 private:
  int64_t batch() const { return problem_.starts ? 1 : problem_.sequences; }
  int64_t tokens() const { return problem_.starts ? starts_.data()[problem_.sequences] : problem_.length; }
  int64_t first(int64_t n) const { return problem_.starts ? starts_.data()[n] : 0; }
  int64_t count(int64_t n) const { return problem_.starts ? starts_.data()[n + 1] - first(n) : problem_.length; }
  Tensor tail() const { return contiguous(problem_.type, problem_.sequences, 1, problem_.taps - 1, problem_.channels); }

  void sizes() {
    Convolution& p = problem_;
    const int64_t lengths[] = {0, 1, 2, 3, 7, 16, 17, 30, 249, 256, 257, 600};
    const int64_t widths[] = {8, 16, 64, 255, 256, 257, 520};
    const int64_t limit = random_.chance(0.2) ? 100000 : 10000;
    do {
      p.sequences = random_.between(0, 4), p.taps = random_.chance(0.4) ? 4 : random_.between(1, qkv::MOST_TAPS);
      p.length = random_.pick(lengths);
      p.channels = random_.chance(0.5) ? random_.between(1, 140) : random_.pick(widths);
      p.starts = nullptr;
      if (random_.chance(0.4)) {
        starts_ = packed(random_, p.sequences, [&] { return random_.pick(lengths); });
        p.starts = starts_.data();
        p.length = tokens();
      }
    } while (batch() * tokens() * p.channels > limit);
  }

  void point() {
    Convolution& p = problem_;
    p.x_stride[0] = x_.stride[0], p.x_stride[1] = x_.stride[2];
    p.x = x_.data(), p.weight = weight_.data(), p.bias = bias_.data(), p.before = before_.data();
  }

  // One channel of one sequence: output t takes the rows t to t + K - 1 of the state before and the inputs.
  void channel(int64_t n, int64_t c, Truth& truth) const {
    const Convolution& p = problem_;
    const int64_t kept = p.taps - 1, length = count(n), row = p.starts ? 0 : n, channels = p.channels;
    Numbers rows(size_t(kept + length), 0.0), grads = rows;
    for (int64_t i = 0; i < kept && before_.bytes; ++i) rows[size_t(i)] = before_.at(n, 0, i, c);
    for (int64_t t = 0; t < length; ++t) rows[size_t(kept + t)] = x_.at(row, 0, first(n) + t, c);
    for (int64_t t = 0; t < length; ++t) {
      double sum = bias_.bytes ? bias_.at(0, 0, 0, c) : 0;
      for (int64_t k = 0; k < p.taps; ++k) sum += weight_.at(0, 0, c, k) * rows[size_t(t + k)];
      truth["output"][size_t((row * tokens() + first(n) + t) * channels + c)] = p.silu ? silu_of(sum) : sum;
      const double grad = grad_output_.at(row, 0, first(n) + t, c) * (p.silu ? silu_slope_of(sum) : 1);
      truth["grad_bias"][size_t(c)] += grad;
      for (int64_t k = 0; k < p.taps; ++k) {
        truth["grad_weight"][size_t(c * p.taps + k)] += grad * rows[size_t(t + k)];
        grads[size_t(t + k)] += grad * weight_.at(0, 0, c, k);
      }
    }
    for (int64_t i = 0; i < kept; ++i) {
      truth["after"][size_t((n * kept + i) * channels + c)] = rows[size_t(length + i)];
      if (grad_after_.bytes) grads[size_t(length + i)] += grad_after_.at(n, 0, i, c);
    }
    for (int64_t i = 0; i < kept + length; ++i) {
      if (i < kept) truth["grad_before"][size_t((n * kept + i) * channels + c)] = grads[size_t(i)];
      else truth["grad_x"][size_t((row * tokens() + first(n) + i - kept) * channels + c)] = grads[size_t(i)];
    }
  }

  Random random_;
  Convolution problem_ = {};
  Exact<int64_t> starts_;
  Tensor x_, weight_, bias_, before_, grad_output_, grad_after_;
  bool after_ = false, grad_x_ = false, grad_weight_ = false, grad_bias_ = false, grad_before_ = false;  // wanted
};

}  // namespace driver
