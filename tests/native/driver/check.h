// Runs a case on every instruction set and thread count, and holds the results against the reference and one another.
#pragma once

#include <sstream>

#include "calls.h"
#include "reference.h"

namespace driver {

class Checker {
 public:
  // What is wrong with a case, one line each; nothing where all is right.
  std::vector<std::string> check(uint64_t seed, int64_t limit, const std::vector<std::string>& isas) {
    Case made = CaseMaker(seed, limit).make();
    const Reference reference(made);
    std::vector<Results> first;
    for (const std::string& isa : isas) {
      choose(isa, 1);
      first.push_back(run(made, 1));
      against_truth(made, reference.truth(), first.back());
      for (int32_t threads : {2, 3}) {
        choose(isa, threads);
        same_bits(first.back(), run(made, threads), "as by one thread");
      }
      choose(isa, 2);
      same_bits(first.back(), run_forward_alone(made, 2), "as in a forward pass alone");
      Poll poll = {1 + int64_t(seed % 2), 0};
      interrupted(run(made, 2, &poll), poll);
      same_bits(first.back(), run(made, 2), "after an interrupted call");
    }
    poison(made, reference, seed);
    for (size_t n = 0; n < isas.size(); ++n) {
      choose(isas[n], 2);
      same_bits(first[n], run(made, 2), "with other hidden content");
    }
    for (std::string& line : lines_) line += "  [" + made.text() + "]";
    return std::move(lines_);
  }

 private:
  template <class... Words>
  void fail(const Words&... words) {
    if (lines_.size() >= 20) return;
    std::ostringstream line;
    line.precision(17);
    line << isa_ << ", " << threads_ << " threads: ";
    (line << ... << words);
    lines_.push_back(line.str());
  }

  void choose(const std::string& isa, int32_t threads) {
    isa_ = isa, threads_ = threads;
    if (!qkv::choose_isa(isa.c_str()) || isa != qkv::isa()) fail("cannot be chosen");
  }

  void against_truth(const Case& made, const Truth& truth, const Results& r) {
    if (r.forward != Status::ok) return fail("forward gives status ", int(r.forward));
    if (r.backward != Status::ok) return fail("backward gives status ", int(r.backward));
    const Problem& p = made.problem;
    const Type wide = computing(p.type);
    const bool casts = p.type == Type::bfloat16 && (isa_ == "avx512bf16" || isa_ == "amx" || isa_ == "tiles");
    close("output", r.output, truth.output, casts ? p.type : p.output_type);
    close("lse", r.lse, truth.lse, wide);
    close("max_scores", r.max_scores, truth.max_scores, wide);
    close("entropy", r.entropy, truth.entropy, wide);
    close("grad_query", r.grad_query, truth.grad_query, p.type);  // whatever its type, they feel a rounded output
    close("grad_key", r.grad_key, truth.grad_key, p.type);
    close("grad_value", r.grad_value, truth.grad_value, p.type);
    close("grad_bias", r.grad_bias, truth.grad_bias, p.type);
    close("grad_sinks", r.grad_sinks, truth.grad_sinks, p.type);
    sums(made, truth, r);
  }

  // Of a row that sees something: (shift + log2(total)) · ln 2 is its lse. Of others: total is 1, shift some number.
  void sums(const Case& made, const Truth& truth, const Results& r) {
    Tensor lse = contiguous(Type::float64, r.shift.count(), 1, 1, 1);
    for (int64_t n = 0; n < r.shift.count(); ++n) {
      const double shift = load(r.shift.type, r.shift.data(), n), total = load(r.total.type, r.total.data(), n);
      const bool seen = truth.lse[size_t(n)].value > -INF;
      lse.set(n, 0, 0, 0, seen ? (shift + std::log2(total)) * 0.6931471805599453 : -INF);
      if (!seen && !(total == 1 && std::isfinite(shift))) fail("row ", n, " sees nothing, total is ", total);
    }
    close("shift and total", lse, truth.lse, computing(made.problem.type));
  }

  // How far from the truth a number may be that went through a type, relative to its terms and as it is.
  struct Tolerance {
    double relative, least;

    explicit Tolerance(Type type) : relative(2e-5), least(1e-30) {
      if (type == Type::float64) relative = 1e-11, least = 1e-290;
      if (type == Type::float16) relative = 4 * 0x1p-11, least = 0x1p-24;
      if (type == Type::bfloat16) relative = 4 * 0x1p-8;
    }
  };

  // `precision`: the narrowest type that the numbers went through.
  void close(const char* name, const Tensor& got, const Sums& expected, Type precision) {
    if (!got.memory) return;
    const Tolerance tolerance(precision);
    for (size_t n = 0; n < expected.size(); ++n) {
      const double value = load(got.type, got.data(), int64_t(n)), error = std::abs(value - expected[n].value);
      if (value == expected[n].value || error <= tolerance.relative * expected[n].size + tolerance.least) continue;
      return fail(name, "[", n, "] is ", value, ", must be ", expected[n].value, " within ",
                  tolerance.relative * expected[n].size);
    }
  }

  void same_bits(const Results& a, const Results& b, const char* which) {
    const std::string names = difference(a, b);
    if (!names.empty()) fail(names, "not ", which);
  }

  void interrupted(const Results& r, const Poll& poll) {
    const Status last = r.forward == Status::ok ? r.backward : r.forward;
    if (last != (poll.stopped() ? Status::interrupted : Status::ok)) {
      fail("status is ", int(last), " though poll ", poll.stopped() ? "stopped" : "did not stop", " the call");
    }
  }

  // Other content in keys and values that no query sees, and in queries that see no key.
  void poison(Case& made, const Reference& reference, uint64_t seed) {
    const double contents[] = {std::nan(""), INF, -INF, 3e38};
    const double content = contents[seed % 4];
    const Problem& p = made.problem;
    const auto fill = [&](Tensor& tensor, int64_t h, std::pair<int64_t, int64_t> place) {
      const auto [b, row] = place;
      for (int64_t c = 0; c < tensor.size[3] && !tensor.aliased(); ++c) tensor.set(b, h, row, c, content);
    };
    for (int64_t b = 0; b < p.batch; ++b) {
      for (int64_t g = 0; g < p.kv_heads; ++g) {
        std::vector<uint8_t> key_seen(static_cast<size_t>(made.keys(b)));
        for (int64_t h = g * p.heads / p.kv_heads; h < (g + 1) * p.heads / p.kv_heads; ++h) {
          for (int64_t i = 0; i < made.queries(b); ++i) {
            bool sees = false;
            for (int64_t j = 0; j < made.keys(b); ++j) {
              if (!reference.sees(b, h, i, j)) continue;
              sees = true;
              key_seen[size_t(j)] = 1;
            }
            if (!sees) fill(made.query, h, made.query_place(b, i));
          }
        }
        for (int64_t j = 0; j < made.keys(b); ++j) {
          if (!key_seen[size_t(j)]) fill(made.key, g, made.key_place(b, j)), fill(made.value, g, made.key_place(b, j));
        }
      }
    }
  }

  std::string isa_ = "?";
  int32_t threads_ = 0;
  std::vector<std::string> lines_;
};

}  // namespace driver
