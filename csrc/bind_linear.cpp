// The linear family for Python. As in bind.cpp, pointers are integers, 0 for null, and the caller keeps what they point to.
#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <utility>
#include <vector>

#include "bind_run.h"
#include "linear.h"

namespace qkv {
namespace {

using namespace nb::literals;
using Three = std::array<int64_t, 3>;

Stride stride(const Three& given) { return {given[0], given[1], given[2]}; }

class OwnedRecurrence {
 public:
  // sizes: N, H, K, L, D, V; types: of q, k, v, of the gate, of beta, of the output; kinds: gate, feature, delta, normalize
  OwnedRecurrence(const std::array<int64_t, 6>& sizes, const std::array<int32_t, 4>& types,
                  const std::array<int32_t, 4>& kinds, double scale, std::vector<int64_t> starts, const Three& query,
                  const Three& key, const Three& value, const Three& gate, const Three& beta, const Three& output)
      : starts_(std::move(starts)) {
    const auto [sequences, heads, key_heads, length, key_dim, value_dim] = sizes;
    problem_ = {static_cast<Type>(types[0]),
                static_cast<Type>(types[1]),
                static_cast<Type>(types[2]),
                static_cast<Type>(types[3]),
                sequences,
                heads,
                key_heads,
                length,
                key_dim,
                value_dim,
                starts_.empty() ? nullptr : starts_.data(),
                stride(query),
                stride(key),
                stride(value),
                stride(gate),
                stride(beta),
                stride(output),
                static_cast<Gates>(kinds[0]),
                static_cast<Feature>(kinds[1]),
                kinds[2] != 0,
                kinds[3] != 0,
                scale};
  }
  OwnedRecurrence(const OwnedRecurrence&) = delete;
  OwnedRecurrence& operator=(const OwnedRecurrence&) = delete;

  void forward(int32_t threads, Address query, Address key, Address value, Address gate, Address beta, Address before,
               Address output, Address after, Address checkpoints) const {
    const RecurrenceForward tensors{at(query),  at(key),    at(value), at(gate),       at(beta),
                                    at(before), at(output), at(after), at(checkpoints)};
    run(threads, [&](const Run& how) { return recur(problem_, tensors, how); });
  }

  // strides: of the gradients of the output, q, k and v
  void backward(int32_t threads, const std::array<Three, 4>& strides, Address query, Address key, Address value,
                Address gate, Address beta, Address checkpoints, Address output, Address grad_output,
                Address grad_after, Address grad_query, Address grad_key, Address grad_value, Address grad_gate,
                Address grad_beta, Address grad_before) const {
    const RecurrenceBackward tensors{at(query),      at(key),         at(value),     at(gate),
                                     at(beta),       at(checkpoints), at(output),    at(grad_output),
                                     stride(strides[0]), stride(strides[1]), stride(strides[2]), stride(strides[3]),
                                     at(grad_after), at(grad_query), at(grad_key), at(grad_value),
                                     at(grad_gate),   at(grad_beta), at(grad_before)};
    run(threads, [&](const Run& how) { return recur_backward(problem_, tensors, how); });
  }

 private:
  Recurrence problem_{};
  const std::vector<int64_t> starts_;
};

}  // namespace

void bind_linear(nb::module_& module) {
  nb::class_<OwnedRecurrence>(module, "Recurrence")
      .def(nb::init<const std::array<int64_t, 6>&, const std::array<int32_t, 4>&, const std::array<int32_t, 4>&, double,
                    std::vector<int64_t>, const Three&, const Three&, const Three&, const Three&, const Three&,
                    const Three&>(),
           "sizes"_a, "types"_a, "kinds"_a, "scale"_a, "starts"_a, "query"_a, "key"_a, "value"_a, "gate"_a, "beta"_a,
           "output"_a)
      .def("forward", &OwnedRecurrence::forward, "threads"_a, "query"_a, "key"_a, "value"_a, "gate"_a, "beta"_a,
           "before"_a, "output"_a, "after"_a, "checkpoints"_a)
      .def("backward", &OwnedRecurrence::backward, "threads"_a, "strides"_a, "query"_a, "key"_a, "value"_a,
           "gate"_a, "beta"_a, "checkpoints"_a, "output"_a, "grad_output"_a, "grad_after"_a, "grad_query"_a,
           "grad_key"_a, "grad_value"_a, "grad_gate"_a, "grad_beta"_a, "grad_before"_a);
}

}  // namespace qkv
