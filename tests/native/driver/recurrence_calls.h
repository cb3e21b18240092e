// One recurrence as the checker asks for it: whole, in place, forward alone, and token by token as a decoder does.
#pragma once

#include "recurrence_reference.h"

namespace driver {

class RecurrenceQuestion {
 public:
  explicit RecurrenceQuestion(uint64_t seed) : made_(RecurrenceMaker(seed).make()) {}

  std::string text() const { return made_.text(); }
  Truth truth() const { return RecurrenceReference(made_).truth(); }
  void fill_inputs_with_nan() { made_.fill_inputs_with_nan(); }

  Outcome run(const How& how) const {
    Outcome made;
    Random layouts(made_.layouts);
    Recurrence p = made_.problem;
    const Type wide = computing(p.type);
    const Tensor& output = made.add("output", results_like(layouts, made_.value, p.output_type));
    p.output = stride_of(output);
    Tensor& after = made.add("after", contiguous(wide, p.sequences, p.heads, p.key_dim, made_.width()));
    const bool in_place = how.in_place && made_.before.bytes;
    if (in_place) after = copy_of(made_.before);
    if (!how.forward_alone) {
      made.add("checkpoints", contiguous(wide, p.heads, made_.chunks(), p.key_dim, made_.width()));
    }
    made.status = qkv::recur(p, forward_pointers(made, in_place), how.run());
    if (made.status == Status::ok && !how.forward_alone) backward(p, made, layouts, how);
    return made;
  }

  // The state carried on in place, one to three tokens at a time.
  Outcome decode(const How& how) const {
    Outcome made;
    Recurrence p = made_.problem;
    const Tensor& output = made.add("output", contiguous(p.output_type, p.sequences, p.heads, p.length, p.value_dim));
    p.output = stride_of(output);
    Tensor& after = made.add("after", contiguous(computing(p.type), p.sequences, p.heads, p.key_dim, made_.width()));
    if (made_.before.bytes) after = copy_of(made_.before);
    else fill(after, [] { return 0; });
    for (int64_t t = 0, step = 1; t < made_.problem.length && made.status == Status::ok; t += step) {
      step = std::min(1 + t % 3, made_.problem.length - t);
      p.length = step;
      const auto from = [&](const Tensor& tensor) { return tensor.bytes ? later(tensor, t) : nullptr; };
      const qkv::RecurrenceForward tensors = {from(made_.query), from(made_.key), from(made_.value), from(made_.gate),
                                              from(made_.beta),  after.data(),    later(output, t),  after.data(),
                                              nullptr};
      made.status = qkv::recur(p, tensors, how.run());
    }
    return made;
  }

  bool decodes() const { return !made_.packed() && made_.problem.length <= 20; }

 private:
  static Tensor results_like(Random& layouts, const Tensor& tensor, Type type) {
    return in_rows(layouts, type, tensor.size[0], tensor.size[1], tensor.size[2], tensor.size[3], true);
  }

  static void* later(const Tensor& tensor, int64_t token) {
    return static_cast<char*>(tensor.data()) + token * tensor.stride[2] * width_of(tensor.type);
  }

  qkv::RecurrenceForward forward_pointers(const Outcome& made, bool in_place) const {
    return {made_.query.data(),
            made_.key.data(),
            made_.value.data(),
            made_.gate.data(),
            made_.beta.data(),
            in_place ? made.at("after") : made_.before.data(),
            made.at("output"),
            made.at("after"),
            made.at("checkpoints")};
  }

  void backward(const Recurrence& p, Outcome& made, Random& layouts, const How& how) const {
    const Type wide = computing(p.type);
    Stride strides[3] = {};
    const auto like = [&](const char* name, bool wanted, const Tensor& tensor, Stride& stride) {
      if (wanted) stride = stride_of(made.add(name, results_like(layouts, tensor, p.type)));
    };
    like("grad_query", made_.grad_query, made_.query, strides[0]);
    like("grad_key", made_.grad_key, made_.key, strides[1]);
    like("grad_value", made_.grad_value, made_.value, strides[2]);
    const auto stream = [&](const char* name, bool wanted, const Tensor& tensor) {
      if (wanted) made.add(name, contiguous(wide, made_.batch(), p.heads, made_.tokens(), tensor.size[3]));
    };
    stream("grad_gate", made_.grad_gate, made_.gate);
    stream("grad_beta", made_.grad_beta, made_.beta);
    if (made_.grad_before) {
      made.add("grad_before", contiguous(wide, p.sequences, p.heads, p.key_dim, made_.width()));
    }
    const qkv::RecurrenceBackward tensors = {made_.query.data(),
                                             made_.key.data(),
                                             made_.value.data(),
                                             made_.gate.data(),
                                             made_.beta.data(),
                                             made.at("checkpoints"),
                                             made.at("output"),
                                             made_.grad_output.data(),
                                             stride_of(made_.grad_output),
                                             strides[0],
                                             strides[1],
                                             strides[2],
                                             made_.grad_after.data(),
                                             made.at("grad_query"),
                                             made.at("grad_key"),
                                             made.at("grad_value"),
                                             made.at("grad_gate"),
                                             made.at("grad_beta"),
                                             made.at("grad_before")};
    made.status = qkv::recur_backward(p, tensors, how.run());
  }

  RecurrenceCase made_;
};

}  // namespace driver
