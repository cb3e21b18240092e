// One forward and one backward pass of a case, and what they wrote.
#pragma once

#include "poll.h"
#include "problems.h"

namespace driver {

using qkv::Status;

// Everything that one forward and one backward pass wrote; the names serve messages.
struct Results {
  Tensor output, lse, max_scores, shift, total, entropy;
  Tensor grad_query, grad_key, grad_value, grad_bias, grad_sinks;
  Status forward = Status::ok, backward = Status::ok;

  std::vector<std::pair<const char*, const Tensor*>> named() const {
    return {{"output", &output},         {"lse", &lse},           {"max_scores", &max_scores}, {"shift", &shift},
            {"total", &total},           {"entropy", &entropy},   {"grad_query", &grad_query}, {"grad_key", &grad_key},
            {"grad_value", &grad_value}, {"grad_bias", &grad_bias}, {"grad_sinks", &grad_sinks}};
  }
};

inline qkv::Forward forward_pointers(const Case& made, const Results& r) {
  return {made.query.data(),   made.key.data(), made.value.data(), made.bias.data(),
          made.sinks.data(),   made.seed,       r.output.data(),   r.lse.data(),
          r.max_scores.data(), r.shift.data(),  r.total.data(),    r.entropy.data()};
}

inline qkv::Backward backward_pointers(const Case& made, const Results& r) {
  qkv::Backward backward = {made.query.data(),
                            made.key.data(),
                            made.value.data(),
                            made.bias.data(),
                            made.sinks.data(),
                            made.seed,
                            r.output.data(),
                            r.shift.data(),
                            r.total.data(),
                            made.grad_output.data(),
                            {},
                            made.grad_lse.data(),
                            r.grad_query.data(),
                            r.grad_key.data(),
                            r.grad_value.data(),
                            r.grad_bias.data(),
                            r.grad_sinks.data()};
  std::copy(made.grad_output.stride, made.grad_output.stride + 4, backward.grad_output_stride);
  return backward;
}

// Room for the results that a case wants: zeros for the gradient of a bias, NaN for all else.
inline Results room_for(const Case& made) {
  const Problem& p = made.problem;
  const Type wide = computing(p.type);
  const auto like = [&](bool wanted, Type type, const Tensor& t, int64_t width) {
    return wanted ? contiguous(type, t.size[0], t.size[1], t.size[2], width) : Tensor();
  };
  const auto rows = [&](bool wanted) { return like(wanted, wide, made.query, 1); };
  Results r;
  r.output = like(true, p.output_type, made.query, p.value_dim);
  r.shift = rows(true), r.total = rows(true);
  r.lse = rows(made.lse), r.max_scores = rows(made.max_scores), r.entropy = rows(made.entropy);
  r.grad_query = like(made.grad_query, p.type, made.query, p.head_dim);
  r.grad_key = like(made.grad_key, p.type, made.key, p.head_dim);
  r.grad_value = like(made.grad_value, p.type, made.value, p.value_dim);
  r.grad_bias = like(made.grad_bias, wide, made.bias, made.bias.size[3]);
  r.grad_sinks = like(made.grad_sinks, wide, made.sinks, 1);
  if (r.grad_bias.bytes) std::memset(r.grad_bias.memory.get(), 0, r.grad_bias.bytes);
  return r;
}

inline Results run(const Case& made, int32_t threads, Poll* poll = nullptr) {
  Results r = room_for(made);
  const qkv::Run how = {threads, poll ? Poll::ask : nullptr, poll};
  r.forward = qkv::forward(made.problem, forward_pointers(made, r), how);
  if (r.forward == Status::ok) r.backward = qkv::backward(made.problem, backward_pointers(made, r), how);
  return r;
}

// The forward pass of a call that needs no gradients: without the sums that the backward pass takes.
inline Results run_forward_alone(const Case& made, int32_t threads) {
  Results r = room_for(made);
  for (Tensor* absent : {&r.shift, &r.total, &r.grad_query, &r.grad_key, &r.grad_value, &r.grad_bias, &r.grad_sinks}) {
    *absent = Tensor();
  }
  r.forward = qkv::forward(made.problem, forward_pointers(made, r), {threads, nullptr, nullptr});
  return r;
}

// The names of all results of both that differ in any bit.
inline std::string difference(const Results& a, const Results& b) {
  std::string names = a.forward == b.forward && a.backward == b.backward ? "" : "status ";
  const auto left = a.named(), right = b.named();
  for (size_t n = 0; n < left.size(); ++n) {
    const Tensor &x = *left[n].second, &y = *right[n].second;
    const size_t bytes = std::min(x.bytes, y.bytes);  // 0 where either is absent
    if (bytes && std::memcmp(x.memory.get(), y.memory.get(), bytes)) names += std::string(left[n].first) + " ";
  }
  return names;
}

}  // namespace driver
