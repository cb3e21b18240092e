// The core for Python: integers in, nothing else. Pointers are integers, 0 for null; the caller keeps what they point to.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "base/pages.h"
#include "bind_run.h"

using namespace nb::literals;

namespace qkv {

unsigned long main_thread;

namespace {

using Four = std::array<int64_t, 4>;

void copy(const Four& from, int64_t (&to)[4]) { std::copy(from.begin(), from.end(), to); }

// query_rows, query_count, key_rows, key_count, rows, cols, row_ptr, runs, partial_ptr, partial, masks
using PartTuple = std::tuple<Address, int64_t, Address, int64_t, int64_t, int64_t, Address, Address, Address, Address,
                             Address>;

Part part(const PartTuple& given) {
  const auto [query_rows, query_count, key_rows, key_count, rows, cols, row_ptr, runs, partial_ptr, partial, masks] =
      given;
  const Schedule schedule{rows,
                          cols,
                          at<const int32_t>(row_ptr),
                          at<const int32_t>(runs),
                          at<const int32_t>(partial_ptr),
                          at<const int32_t>(partial),
                          at<const uint64_t>(masks)};
  return {at<const int32_t>(query_rows), query_count, at<const int32_t>(key_rows), key_count, schedule};
}

class OwnedPlan {
 public:
  OwnedPlan(const std::vector<std::vector<PartTuple>>& members, Address index, int64_t batch_stride,
            int64_t head_stride) {
    for (const auto& member : members) {
      parts_.emplace_back(member.size());
      std::transform(member.begin(), member.end(), parts_.back().begin(), part);
    }
    for (const auto& each : parts_) members_.push_back({each.data(), static_cast<int64_t>(each.size())});
    plan = {members_.data(), static_cast<int64_t>(members_.size()), at<const int32_t>(index), batch_stride,
            head_stride};
  }
  OwnedPlan(const OwnedPlan&) = delete;  // members point into parts
  OwnedPlan& operator=(const OwnedPlan&) = delete;

  Plan plan;

 private:
  std::vector<std::vector<Part>> parts_;
  std::vector<Member> members_;
};

using BiasTuple = std::tuple<int32_t, int32_t, Four, Four>;  // kind, type, size, stride

Bias bias(const std::optional<BiasTuple>& given) {
  Bias made{};
  if (!given) return made;
  const auto& [kind, type, size, stride] = *given;
  made.kind = static_cast<BiasKind>(kind);
  made.type = static_cast<Type>(type);
  copy(size, made.size);
  copy(stride, made.stride);
  return made;
}

class Call {
 public:
  Call(const OwnedPlan& plan, int32_t type, int32_t output_type, const std::array<int64_t, 7>& sizes, const Four& query_stride,
       const Four& key_stride, const Four& value_stride, double scale, double softcap,
       const std::optional<BiasTuple>& given_bias, uint32_t dropout_threshold, std::vector<int64_t> query_starts,
       std::vector<int64_t> key_starts, int64_t batch_origin, int64_t head_origin, std::vector<int64_t> packed_queries,
       std::vector<int64_t> packed_keys, Address page_table, int64_t page_stride, int64_t page_size)
      : query_starts_(std::move(query_starts)),
        key_starts_(std::move(key_starts)),
        packed_queries_(std::move(packed_queries)),
        packed_keys_(std::move(packed_keys)) {
    problem_.type = static_cast<Type>(type);
    problem_.output_type = static_cast<Type>(output_type);
    const auto [batch, heads, kv_heads, queries, keys, head_dim, value_dim] = sizes;
    problem_.batch = batch;
    problem_.heads = heads;
    problem_.kv_heads = kv_heads;
    problem_.queries = queries;
    problem_.keys = keys;
    problem_.head_dim = head_dim;
    problem_.value_dim = value_dim;
    copy(query_stride, problem_.query_stride);
    copy(key_stride, problem_.key_stride);
    copy(value_stride, problem_.value_stride);
    problem_.scale = scale;
    problem_.softcap = softcap;
    problem_.bias = bias(given_bias);
    problem_.dropout_threshold = dropout_threshold;
    problem_.query_start = query_starts_.data();
    problem_.query_start_stride = query_starts_.size() > 1 ? 1 : 0;
    problem_.key_start = key_starts_.data();
    problem_.key_start_stride = key_starts_.size() > 1 ? 1 : 0;
    problem_.batch_origin = batch_origin;
    problem_.head_origin = head_origin;
    if (!packed_queries_.empty()) problem_.packing = {packed_queries_.data(), packed_keys_.data()};
    problem_.pages = {at<const int32_t>(page_table), page_stride, page_size};
    problem_.plan = plan.plan;
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void forward(int32_t threads, uint64_t seed, Address query, Address key, Address value, Address bias, Address sinks,
               Address output, Address lse, Address max_scores, Address shift, Address total, Address entropy) const {
    const Forward tensors{at(query), at(key),        at(value), at(bias),  at(sinks),  seed,
                          at(output), at(lse), at(max_scores), at(shift), at(total), at(entropy)};
    run(threads, [&](const Run& how) { return qkv::forward(problem_, tensors, how); });
  }

  void backward(int32_t threads, uint64_t seed, const Four& grad_output_stride, Address query, Address key,
                Address value, Address bias, Address sinks, Address output, Address shift, Address total,
                Address grad_output, Address grad_lse, Address grad_query, Address grad_key, Address grad_value, Address grad_bias,
                Address grad_sinks) const {
    Backward tensors{at(query), at(key),   at(value), at(bias),        at(sinks), seed,
                     at(output), at(shift), at(total), at(grad_output), {},        at(grad_lse),
                     at(grad_query), at(grad_key), at(grad_value), at(grad_bias), at(grad_sinks)};
    copy(grad_output_stride, tensors.grad_output_stride);
    run(threads, [&](const Run& how) { return qkv::backward(problem_, tensors, how); });
  }

 private:
  Problem problem_{};
  const std::vector<int64_t> query_starts_, key_starts_, packed_queries_, packed_keys_;
};

nb::list available() { return nb::list(nb::str(available_isas()).attr("split")()); }

void find_main_thread() {
  main_thread = nb::cast<unsigned long>(nb::module_::import_("threading").attr("main_thread")().attr("ident"));
  // In a child the thread that forked is the main one.
  pthread_atfork(nullptr, nullptr, [] { main_thread = PyThread_get_thread_ident(); });
}

}  // namespace
}  // namespace qkv

NB_MODULE(_native, module) {
  using qkv::Call, qkv::OwnedPlan;
  nb::set_leak_warnings(false);  // caches of calls may outlive the interpreter
  qkv::find_main_thread();

  module.attr("ABI") = qkv::ABI_VERSION;
  module.def("isa", &qkv::isa);
  module.def("available_isas", &qkv::available);
  module.def("choose_isa", &qkv::choose_isa, "name"_a);

  module.def(
      "prefer_large_pages", [](qkv::Address data, size_t bytes) { qkv::prefer_large_pages(qkv::at(data), bytes); },
      "data"_a, "bytes"_a);
  qkv::bind_linear(module);
  qkv::bind_beside(module);

  nb::class_<OwnedPlan>(module, "Plan")
      .def(nb::init<const std::vector<std::vector<qkv::PartTuple>>&, qkv::Address, int64_t, int64_t>(), "members"_a,
           "index_ptr"_a, "index_batch_stride"_a, "index_head_stride"_a);

  nb::class_<Call>(module, "Call")
      .def(nb::init<const OwnedPlan&, int32_t, int32_t, const std::array<int64_t, 7>&, const qkv::Four&, const qkv::Four&,
                    const qkv::Four&, double, double, const std::optional<qkv::BiasTuple>&, uint32_t,
                    std::vector<int64_t>, std::vector<int64_t>, int64_t, int64_t, std::vector<int64_t>,
                    std::vector<int64_t>, qkv::Address, int64_t, int64_t>(),
           nb::keep_alive<1, 2>(), "plan"_a, "type"_a, "output_type"_a, "sizes"_a, "query_stride"_a, "key_stride"_a, "value_stride"_a,
           "scale"_a, "softcap"_a, "bias"_a.none(), "dropout_threshold"_a, "query_starts"_a, "key_starts"_a,
           "batch_origin"_a, "head_origin"_a, "packed_queries"_a, "packed_keys"_a, "page_table"_a, "page_stride"_a,
           "page_size"_a)
      .def("forward", &Call::forward, "threads"_a, "seed"_a, "query"_a, "key"_a, "value"_a, "bias"_a, "sinks"_a,
           "output"_a, "lse"_a, "max_scores"_a, "shift"_a, "total"_a, "entropy"_a)
      .def("backward", &Call::backward, "threads"_a, "seed"_a, "grad_output_stride"_a, "query"_a, "key"_a, "value"_a,
           "bias"_a, "sinks"_a, "output"_a, "shift"_a, "total"_a, "grad_output"_a, "grad_lse"_a, "grad_query"_a,
           "grad_key"_a, "grad_value"_a, "grad_bias"_a, "grad_sinks"_a);
}
