// What every question of the linear family is held to, on each of its kernels: the truth, and the same bits by any
// number of threads, in place, without a backward pass, after other content of the scratch memory, and after failures.
//
// A question has text(), truth(), run(how) and fill_inputs_with_nan().
#pragma once

#include <sstream>

#include "allocations.h"
#include "rows.h"

namespace driver {

using qkv::Status;

// What is wrong, one line each.
class Findings {
 public:
  void on(const std::string& isa) { isa_ = isa; }

  template <class... Words>
  void add(const Words&... words) {
    if (lines_.size() >= 20) return;
    std::ostringstream line;
    line.precision(17);
    line << isa_ << ": ";
    (line << ... << words);
    lines_.push_back(line.str());
  }

  std::vector<std::string> lines(const std::string& question) {
    for (std::string& line : lines_) line += "  [" + question + "]";
    return std::move(lines_);
  }

  // Every number of every result, relative to the greatest of its tensor, and that no others were written.
  void close(const Outcome& made, const Truth& truth) {
    if (made.status != Status::ok) return add("status is ", int(made.status));
    for (const auto& [name, tensor] : made.results) {
      if (!gaps_are_left(tensor)) add(name, " is written beside its numbers");
      if (truth.count(name)) close(name, tensor, truth.at(name));
    }
  }

  void same(const Outcome& right, const Outcome& made, const char* which) {
    const std::string names = difference(right, made);
    if (!names.empty()) add(names, "not ", which);
  }

  // The names of all results of both that differ in any byte.
  static std::string difference(const Outcome& a, const Outcome& b) {
    std::string names = a.status == b.status ? "" : "status ";
    for (const auto& [name, tensor] : a.results) {
      const auto other = b.results.find(name);
      if (other == b.results.end() || !tensor.bytes) continue;
      if (std::memcmp(tensor.memory.get(), other->second.memory.get(), tensor.bytes)) names += name + " ";
    }
    return names;
  }

 private:
  static double tolerance(Type type) {
    return type == Type::float64 ? 1e-11 : type == Type::float32 ? 1e-4 : type == Type::float16 ? 0x1p-10 : 0x1p-7;
  }

  void close(const std::string& name, const Tensor& tensor, const Numbers& truth) {
    double most = 0.5;
    for (const double number : truth) most = std::max(most, std::abs(number));
    const double allowed = tolerance(tensor.type) * most;
    size_t n = 0, wrong = 0;
    tensor.each([&](int64_t a, int64_t b, int64_t c, int64_t d) {
      const double value = tensor.at(a, b, c, d), expected = truth[n++];
      if (std::abs(value - expected) <= allowed || wrong++) return;
      add(name, "[", a, ", ", b, ", ", c, ", ", d, "] is ", value, ", must be ", expected, " within ", allowed);
    });
    if (n != truth.size()) add(name, " has ", n, " numbers, the truth ", truth.size());
  }

  std::string isa_ = "?";
  std::vector<std::string> lines_;
};

template <class Question>
void hold(const Question& asked, const Truth& truth, uint64_t seed, Findings& found) {
  const Outcome first = asked.run({});
  found.close(first, truth);
  for (const int32_t threads : {2, 3, 4}) found.same(first, asked.run({threads}), "as by one thread");
  found.same(first, asked.run({1 + int32_t(seed % 2), true}), "as in memory of its own");
  found.same(first, asked.run({2, false, true}), "as with a backward pass");
  Poll poll = {1 + int64_t(seed % 2), 0};
  const Outcome stopped = asked.run({2, false, false, &poll});
  if (stopped.status != (poll.stopped() ? Status::interrupted : Status::ok)) {
    found.add("status is ", int(stopped.status), poll.stopped() ? " though poll stopped" : " though poll did not stop");
  }
  Question other(seed);
  other.fill_inputs_with_nan();
  for (const int32_t threads : {1, 3}) {
    other.run({threads});
    found.same(first, asked.run({threads}), "after a call full of NaN");
  }
}

template <class Question>
void hold_without_memory(const Question& asked, Findings& found) {
  const Outcome right = asked.run({});
  const std::string wrong = without_memory(
      [&] { return asked.run({}); },
      [&](const Outcome& made, bool was_short) -> std::string {
        if (was_short && made.status == Status::out_of_memory) return "";
        if (Findings::difference(right, made).empty()) return "";
        return was_short ? "a missing result is not told" : "the call after one without memory differs";
      });
  if (!wrong.empty()) found.add(wrong);
}

}  // namespace driver
