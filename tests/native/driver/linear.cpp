// The linear family: recurrences, and the short convolutions and norms beside them; projections of few rows.
#include "linear.h"

#include "convolutions.h"
#include "linear_check.h"
#include "norms.h"
#include "projections.h"
#include "recurrence_calls.h"

namespace driver {
namespace {

template <class Question, class More>
std::vector<std::string> check(uint64_t seed, const std::vector<std::string>& isas, More more) {
  const Question asked(seed);
  const Truth truth = asked.truth();
  Findings found;
  for (const std::string& isa : isas) {
    found.on(isa);
    if (!qkv::choose_isa(isa.c_str())) found.add("cannot be chosen");
    hold(asked, truth, seed, found);
    if (seed % 4 == 0) hold_without_memory(asked, found);
    more(asked, truth, found);
  }
  return found.lines(asked.text());
}

// The calls below take tens of milliseconds and more on any processor of today, though their inputs are one row.
class LongCalls {
 public:
  // Which of them do not stop; nothing where all do.
  std::string that_go_on() {
    const auto one = [&](const char* name, auto call) {
      Poll poll = {1, 0};
      if (call(qkv::Run{1, Poll::ask, &poll}) != Status::interrupted) found_ += std::string(name) + ", ";
    };
    one("a recurrence", [&](const qkv::Run& run) { return recur(run); });
    one("a recurrence backward", [&](const qkv::Run& run) { return recur_backward(run); });
    one("a convolution", [&](const qkv::Run& run) { return qkv::convolution(convolution(), run); });
    one("a convolution backward", [&](const qkv::Run& run) {
      const qkv::ConvolutionGradients grads = {x_.data(), {0, 0}, nullptr, output_.data(), nullptr, nullptr, nullptr};
      return qkv::convolution_backward(convolution(), grads, run);
    });
    one("a norm", [&](const qkv::Run& run) { return qkv::norm(norm(), run); });
    one("a norm backward", [&](const qkv::Run& run) {
      const qkv::NormGradients grads = {x_.data(), {0, 0}, output_.data(), nullptr, nullptr};
      return qkv::norm_backward(norm(), grads, run);
    });
    one("a projection", [&](const qkv::Run& run) { return qkv::project(projection(), run); });
    return found_;
  }

 private:
  static Recurrence recurrence(int64_t length, int64_t width) {
    Recurrence p = {};
    p.sequences = 1, p.heads = p.key_heads = 64, p.length = length, p.key_dim = p.value_dim = width, p.scale = 1;
    return p;
  }

  Status recur(const qkv::Run& run) {
    const void* const x = x_.data();
    const Tensor states = contiguous(Type::float32, 1, 64, 64, 64);
    return qkv::recur(recurrence(1 << 17, 64),
                      {x, x, x, nullptr, nullptr, nullptr, output_.data(), states.data(), nullptr}, run);
  }

  Status recur_backward(const qkv::Run& run) {
    const Tensor checkpoints = contiguous(Type::float32, 64, 512, 16, 16);
    qkv::RecurrenceBackward back = {};
    back.query = back.key = back.value = back.grad_output = x_.data();
    back.checkpoints = checkpoints.data(), back.grad_value = output_.data();
    return qkv::recur_backward(recurrence(1 << 15, 16), back, run);
  }

  qkv::Convolution convolution() const {
    qkv::Convolution p = {};
    p.sequences = 1, p.length = NUMBERS, p.channels = 1, p.taps = 8, p.silu = true;
    p.x = p.weight = x_.data(), p.output = output_.data();
    return p;
  }

  qkv::Norm norm() const {
    qkv::Norm p = {};
    p.activation = Activation::silu, p.outer = NUMBERS, p.inner = p.width = p.weight_rows = 1, p.eps = 1e-6;
    p.x = p.gate = x_.data(), p.output = output_.data();
    return p;
  }

  qkv::Projection projection() const {
    qkv::Projection p = {};
    p.rows = p.inputs = 1, p.outputs = NUMBERS, p.x = p.weight = x_.data(), p.output = output_.data();
    return p;
  }

  static constexpr int64_t NUMBERS = 1 << 22;
  const Tensor x_ = contiguous(Type::float32, 1, 1, 1, 64), output_ = contiguous(Type::float32, 1, 1, 1, NUMBERS);
  std::string found_;
};

}  // namespace

std::vector<std::string> check_recurrence(uint64_t seed, const std::vector<std::string>& isas) {
  const auto decoding = [](const RecurrenceQuestion& asked, const Truth& truth, Findings& found) {
    if (asked.decodes()) found.close(asked.decode({2}), truth);
  };
  return check<RecurrenceQuestion>(seed, isas, decoding);
}

std::vector<std::string> check_beside(uint64_t seed, const std::vector<std::string>& isas) {
  const auto no_more = [](const auto&, const Truth&, Findings&) {};
  switch (seed % 3) {
    case 0: return check<NormQuestion>(seed / 3, isas, no_more);
    case 1: return check<ConvolutionQuestion>(seed / 3, isas, no_more);
    default: return check<ProjectionQuestion>(seed / 3, isas, no_more);
  }
}

std::string interrupted_linear_calls() {
  const std::string names = LongCalls().that_go_on();
  return names.empty() ? "" : names + "which are long, do not stop";
}

}  // namespace driver
