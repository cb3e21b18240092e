// Random projections of few rows, from the definition in double, and their calls.
#pragma once

#include <sstream>

#include "../../../csrc/projection.h"
#include "rows.h"

namespace driver {

using qkv::Projection;

class ProjectionQuestion {
 public:
  explicit ProjectionQuestion(uint64_t seed) : random_(seed) {
    Projection& p = problem_;
    p.type = random_.chance(0.4) ? Type::float32 : Type(random_.between(1, 3));
    sizes();
    x_ = in_rows(random_, p.type, 1, 1, p.rows, p.inputs);
    weight_ = in_rows(random_, p.type, 1, 1, p.outputs, p.inputs);
    if (random_.chance(0.5)) bias_ = contiguous(p.type, 1, 1, 1, p.outputs);
    for (Tensor* tensor : {&x_, &bias_}) fill(*tensor, [&] { return random_.normal(); });
    fill(weight_, [&] { return random_.normal() / std::sqrt(double(p.inputs)); });
    p.x_stride = x_.stride[2], p.weight_stride = weight_.stride[2];
    p.x = x_.data(), p.weight = weight_.data(), p.bias = bias_.data();
  }

  std::string text() const {
    const Projection& p = problem_;
    std::ostringstream line;
    line << "projection, type " << int(p.type) << ", R" << p.rows << ", N" << p.outputs << ", K" << p.inputs
         << ", strides " << p.x_stride << " " << p.weight_stride << (bias_.bytes ? ", bias" : "");
    return line.str();
  }

  void fill_inputs_with_nan() {
    for (Tensor* tensor : {&x_, &weight_, &bias_}) fill_with_nan(*tensor);
  }

  Truth truth() const {
    const Projection& p = problem_;
    Truth truth;
    Numbers& output = truth["output"];
    for (int64_t r = 0; r < p.rows; ++r) {
      for (int64_t n = 0; n < p.outputs; ++n) {
        double sum = bias_.bytes ? bias_.at(0, 0, 0, n) : 0;
        for (int64_t k = 0; k < p.inputs; ++k) sum += x_.at(0, 0, r, k) * weight_.at(0, 0, n, k);
        output.push_back(sum);
      }
    }
    return truth;
  }

  Outcome run(const How& how) const {
    Projection p = problem_;
    Outcome made;
    p.output = made.add("output", contiguous(p.type, 1, 1, p.rows, p.outputs)).data();
    made.status = qkv::project(p, how.run());
    return made;
  }

 private:
  void sizes() {
    Projection& p = problem_;
    const int64_t limit = random_.chance(0.2) ? 300000 : 20000;
    do {
      p.rows = random_.between(0, 5);
      p.outputs = random_.chance(0.3) ? random_.between(0, 3000) : random_.between(0, 140);
      p.inputs = random_.chance(0.3) ? random_.between(0, 3000) : random_.between(0, 140);
    } while (p.rows * p.outputs * p.inputs > limit);
  }

  Random random_;
  Projection problem_ = {};
  Tensor x_, weight_, bias_;
};

}  // namespace driver
