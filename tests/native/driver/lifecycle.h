// What a host may do around calls: stop one, make several at once, run out of memory.
#pragma once

#include "allocations.h"
#include "calls.h"

namespace driver {

// Whole members of full tiles only, each row in natural order.
inline qkv::Plan dense_plan(PlanTables& tables, int64_t queries, int64_t keys) {
  const int64_t rows = (queries + TILE - 1) / TILE, cols = (keys + TILE - 1) / TILE;
  std::vector<int32_t> row_ptr, runs;
  for (int64_t row = 0; row <= rows; ++row) row_ptr.push_back(int32_t(row));
  for (int64_t row = 0; row < rows; ++row) runs.push_back(0), runs.push_back(int32_t(cols));
  tables.parts.emplace_back();
  PartTables& part = tables.parts.back();
  part.row_ptr = Exact<int32_t>(row_ptr), part.runs = Exact<int32_t>(runs);
  part.partial_ptr = Exact<int32_t>(std::vector<int32_t>(size_t(rows + 1)));
  const qkv::Schedule schedule = {rows,    cols,   part.row_ptr.data(), part.runs.data(), part.partial_ptr.data(),
                                  nullptr, nullptr};
  tables.members.push_back(Exact<qkv::Part>({qkv::Part{nullptr, queries, nullptr, keys, schedule}}));
  tables.member_table = Exact<qkv::Member>({qkv::Member{tables.members.back().data(), 1}});
  tables.index = Exact<int32_t>(std::vector<int32_t>(1));
  return {tables.member_table.data(), 1, tables.index.data(), 0, 0};
}

// Hundreds of milliseconds on any processor of today, though its inputs are a few rows.
inline Case long_case() {
  Case made;
  Problem& p = made.problem;
  p.batch = p.kv_heads = 1, p.heads = 16, p.queries = p.keys = 4096, p.head_dim = p.value_dim = 64, p.scale = 1;
  for (Tensor* tensor : {&made.query, &made.key, &made.value, &made.grad_output}) {
    const int64_t heads = tensor == &made.key || tensor == &made.value ? 1 : p.heads;
    const int64_t size[4] = {1, heads, 4096, 64}, stride[4] = {0, 0, 0, 1};
    std::copy(size, size + 4, tensor->size), std::copy(stride, stride + 4, tensor->stride);
    allocate(*tensor);
    for (int64_t c = 0; c < 64; ++c) tensor->set(0, 0, 0, c, 0.01 * double(c));
  }
  std::copy(made.query.stride, made.query.stride + 4, p.query_stride);
  std::copy(made.key.stride, made.key.stride + 4, p.key_stride);
  std::copy(made.value.stride, made.value.stride + 4, p.value_stride);
  made.query_start = Exact<int64_t>({0});
  p.query_start = p.key_start = made.query_start.data();
  p.plan = dense_plan(made.plan, p.queries, p.keys);
  made.grad_query = made.grad_key = made.grad_value = true;
  return made;
}

// Both passes of a long call end when poll says so.
inline std::string interrupted_call() {
  const Case made = long_case();
  Results r = room_for(made);
  for (Tensor* tensor : {&r.output, &r.shift, &r.total}) {  // in place of a forward pass
    tensor->each([&](int64_t a, int64_t b, int64_t c, int64_t d) { tensor->set(a, b, c, d, 1); });
  }
  Poll polls[2] = {{1, 0}, {1, 0}};
  r.backward = qkv::backward(made.problem, backward_pointers(made, r), {2, Poll::ask, &polls[0]});
  r.forward = qkv::forward(made.problem, forward_pointers(made, r), {2, Poll::ask, &polls[1]});
  if (r.backward != Status::interrupted) return "a long backward pass does not stop";
  return r.forward == Status::interrupted ? "" : "a long forward pass does not stop";
}

// Several host threads make their own calls at once, each several times.
inline std::string calls_at_once(uint64_t seed, int64_t limit) {
  std::vector<std::string> found(4);
  std::vector<std::thread> threads;
  for (size_t n = 0; n < found.size(); ++n) {
    threads.emplace_back([&found, n, seed, limit] {
      const Case made = CaseMaker(seed + n, limit).make();
      const Results alone = run(made, 1);
      for (int32_t round = 0; round < 4; ++round) found[n] += difference(alone, run(made, 1 + round % 3));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& names : found) {
    if (!names.empty()) return names + "differ beside other calls";
  }
  return "";
}

// The first, second, ... allocation of a call fails.
inline std::string call_without_memory(uint64_t seed, int64_t limit) {
  const Case made = CaseMaker(seed, limit).make();
  const Results right = run(made, 1);
  return without_memory([&] { return run(made, 1); }, [&](const Results& r, bool was_short) -> std::string {
    const Status last = std::max(r.forward, r.backward);
    if (!was_short) return difference(right, r).empty() ? "" : "the call after one without memory differs";
    if (last != Status::ok && last != Status::out_of_memory) return "another status than that of no memory";
    return last == Status::ok && !difference(right, r).empty() ? "a missing result is not told" : "";
  });
}

}  // namespace driver
