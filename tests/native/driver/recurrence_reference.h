// A recurrence and its gradients from the definition: token by token, in double. It shares no code with the kernels.
#pragma once

#include "recurrences.h"

namespace driver {

inline double feature_of(Feature feature, double x) {
  if (feature == Feature::none) return x;
  if (feature == Feature::elu) return x > 0 ? x + 1 : std::exp(x);
  return x > 0 ? (feature == Feature::relu ? x : x * x) : 0;
}

inline double slope_of(Feature feature, double x) {
  if (feature == Feature::none) return 1;
  if (feature == Feature::elu) return x > 0 ? 1 : std::exp(x);
  return x > 0 ? (feature == Feature::relu ? 1 : 2 * x) : 0;
}

class RecurrenceReference {
 public:
  explicit RecurrenceReference(const RecurrenceCase& made)
      : made_(made), p_(made.problem), rows_(p_.key_dim), width_(made.width()) {}

  Truth truth() {
    const int64_t tokens = made_.batch() * made_.tokens(), states = p_.sequences * p_.heads * rows_ * width_;
    const auto room = [&](const char* name, int64_t numbers) { truth_[name].assign(size_t(numbers), 0); };
    for (const char* name : {"output", "grad_value"}) room(name, tokens * p_.heads * p_.value_dim);
    for (const char* name : {"after", "grad_before"}) room(name, states);
    for (const char* name : {"grad_query", "grad_key"}) room(name, tokens * p_.key_heads * rows_);
    room("grad_gate", tokens * p_.heads * (p_.gates == Gates::vector ? rows_ : 1));
    room("grad_beta", tokens * p_.heads);
    for (int64_t n = 0; n < p_.sequences; ++n) {
      for (int64_t h = 0; h < p_.heads; ++h) {
        begin(n, h);
        for (int64_t t = 0; t < made_.count(n); ++t) forward(t);
        leave("after", state_);
        given_state();
        for (int64_t t = made_.count(n) - 1; t >= 0; --t) backward(t);
        leave("grad_before", grad_);
      }
    }
    return std::move(truth_);
  }

 private:
  // What a token did, for its gradients.
  struct Step {
    Numbers before, after;   // states (D, W)
    Numbers asked, written;  // (W): what a delta rule finds missing, or the value, and that times beta
    Numbers output;          // (W): before it is divided
  };

  void begin(int64_t n, int64_t h) {
    sequence_ = n, head_ = h, key_head_ = h / (p_.heads / p_.key_heads), row_ = made_.packed() ? 0 : n;
    state_.assign(size_t(rows_ * width_), 0);
    if (made_.before.bytes) read_state(made_.before, state_);
    steps_.clear();
  }

  void given_state() {
    grad_.assign(size_t(rows_ * width_), 0);
    if (made_.grad_after.bytes) read_state(made_.grad_after, grad_);
  }

  void read_state(const Tensor& from, Numbers& to) const {
    for (int64_t i = 0; i < rows_; ++i) {
      for (int64_t j = 0; j < width_; ++j) to[at(i, j)] = from.at(sequence_, head_, i, j);
    }
  }
  void leave(const char* name, const Numbers& state) {
    std::copy(state.begin(), state.end(), truth_[name].begin() + (sequence_ * p_.heads + head_) * rows_ * width_);
  }

  size_t at(int64_t i, int64_t j) const { return size_t(i * width_ + j); }
  int64_t token(int64_t t) const { return made_.first(sequence_) + t; }
  size_t place(int64_t heads, int64_t head, int64_t t, int64_t width) const {  // of a row in contiguous memory
    return size_t(((row_ * heads + head) * made_.tokens() + token(t)) * width);
  }
  double given(const Tensor& tensor, int64_t head, int64_t t, int64_t i) const {
    return tensor.at(row_, head, token(t), i);
  }
  double query(int64_t t, int64_t i) const { return feature_of(p_.feature, given(made_.query, key_head_, t, i)); }
  double key(int64_t t, int64_t i) const { return feature_of(p_.feature, given(made_.key, key_head_, t, i)); }
  double beta(int64_t t) const { return p_.delta ? given(made_.beta, head_, t, 0) : 1; }
  double kept(int64_t t, int64_t i) const {  // the share of row i of the state that stays
    if (p_.gates == Gates::none) return 1;
    return std::exp(given(made_.gate, head_, t, p_.gates == Gates::vector ? i : 0));
  }
  double scale() const { return p_.normalize ? 1 : p_.scale; }

  void forward(int64_t t) {
    Step step;
    step.before = state_;
    step.asked.assign(size_t(width_), 1);  // the value of the normaliser's column
    step.output.assign(size_t(width_), 0);
    for (int64_t j = 0; j < p_.value_dim; ++j) step.asked[size_t(j)] = given(made_.value, head_, t, j);
    for (int64_t i = 0; i < rows_; ++i) {
      const double keeps = kept(t, i), k = key(t, i);
      for (int64_t j = 0; j < width_; ++j) {
        state_[at(i, j)] *= keeps;
        if (p_.delta) step.asked[size_t(j)] -= k * state_[at(i, j)];
      }
    }
    step.written = step.asked;
    for (double& number : step.written) number *= beta(t);
    for (int64_t i = 0; i < rows_; ++i) {
      const double k = key(t, i), q = scale() * query(t, i);
      for (int64_t j = 0; j < width_; ++j) {
        state_[at(i, j)] += k * step.written[size_t(j)];
        step.output[size_t(j)] += q * state_[at(i, j)];
      }
    }
    step.after = state_;
    double* const output = truth_["output"].data() + place(p_.heads, head_, t, p_.value_dim);
    for (int64_t j = 0; j < p_.value_dim; ++j) output[j] = step.output[size_t(j)] * inverse(step);
    steps_.push_back(std::move(step));
  }

  // 1 over the denominator, 0 where that is 0.
  double inverse(const Step& step) const {
    if (!p_.normalize) return 1;
    const double denominator = step.output[size_t(p_.value_dim)];
    return denominator == 0 ? 0 : 1 / denominator;
  }

  // Of the output before it is divided, (W).
  Numbers grad_output(int64_t t) const {
    const Step& step = steps_[size_t(t)];
    Numbers grad(size_t(width_), 0.0);
    for (int64_t j = 0; j < p_.value_dim; ++j) {
      const double g = given(made_.grad_output, head_, t, j) * inverse(step);
      grad[size_t(j)] = g;
      if (p_.normalize) grad[size_t(p_.value_dim)] -= g * step.output[size_t(j)] * inverse(step);
    }
    return grad;
  }

  void backward(int64_t t) {
    const Step& step = steps_[size_t(t)];
    const Numbers output = grad_output(t);
    Numbers queries(size_t(rows_), 0.0), keys = queries, written(size_t(width_), 0.0);
    for (int64_t i = 0; i < rows_; ++i) {  // o = scale Sᵀ q, S = S' + k uᵀ
      for (int64_t j = 0; j < width_; ++j) {
        const double g = grad_[at(i, j)] += scale() * query(t, i) * output[size_t(j)];
        queries[size_t(i)] += scale() * step.after[at(i, j)] * output[size_t(j)];
        keys[size_t(i)] += g * step.written[size_t(j)];
        written[size_t(j)] += g * key(t, i);
      }
    }
    double by_beta = 0;
    for (int64_t j = 0; j < width_; ++j) {  // u = beta l
      by_beta += written[size_t(j)] * step.asked[size_t(j)];
      written[size_t(j)] *= beta(t);
    }
    truth_["grad_beta"][place(p_.heads, head_, t, 1)] = by_beta;
    std::copy_n(written.begin(), p_.value_dim,
                truth_["grad_value"].begin() + int64_t(place(p_.heads, head_, t, p_.value_dim)));
    for (int64_t i = 0; i < rows_; ++i) fade(t, i, step.before, written, keys[size_t(i)]);
    add_rows("grad_query", made_.query, t, queries);
    add_rows("grad_key", made_.key, t, keys);
  }

  // l = v - S'ᵀ k for a delta rule, S' = Diag(w) S, in row i; `asked` is the gradient of l.
  void fade(int64_t t, int64_t i, const Numbers& before, const Numbers& asked, double& grad_key) {
    const double keeps = kept(t, i), k = key(t, i);
    double gate = 0;
    for (int64_t j = 0; j < width_; ++j) {
      double& g = grad_[at(i, j)];
      if (p_.delta) grad_key -= keeps * before[at(i, j)] * asked[size_t(j)], g -= k * asked[size_t(j)];
      gate += g * before[at(i, j)] * keeps;
      g *= keeps;
    }
    const bool vector = p_.gates == Gates::vector;
    truth_["grad_gate"][place(p_.heads, head_, t, vector ? rows_ : 1) + size_t(vector ? i : 0)] += gate;
  }

  // Several value heads read a key head.
  void add_rows(const char* name, const Tensor& tensor, int64_t t, const Numbers& grad) {
    double* const to = truth_[name].data() + place(p_.key_heads, key_head_, t, rows_);
    for (int64_t i = 0; i < rows_; ++i) {
      to[i] += grad[size_t(i)] * slope_of(p_.feature, given(tensor, key_head_, t, i));
    }
  }

  const RecurrenceCase& made_;
  const Recurrence& p_;
  const int64_t rows_, width_;
  int64_t sequence_ = 0, head_ = 0, key_head_ = 0, row_ = 0;
  Numbers state_, grad_;
  std::vector<Step> steps_;
  Truth truth_;
};

}  // namespace driver
