// What the operations beside the recurrence share: the caller's rows as numbers to compute with, gates, sums over units.
#pragma once

#include "../base/threads.h"
#include "../beside.h"
#include "memory-inl.h"
#include "narrow-inl.h"
#include "walk-inl.h"

namespace {

using qkv::Run;
using qkv::Status;
using qkv::Worker;

constexpr int64_t SMALL = 1 << 15;  // numbers: less work than this is not worth waking other threads for

inline Run run_for(const Run& run, int64_t numbers) { return numbers < SMALL ? Run{1, run.poll, run.context} : run; }

// A row of numbers to compute with: the caller's own where they are of that type and fill whole vectors, else their
// copy in `room`, with zeros up to whole vectors.
template <class T>
const T* row_in(const void* data, Type type, int64_t first, int64_t width, T* room) {
  const int64_t whole = width / LANES<T> * LANES<T>;
  if (type == TypeOf<T>::VALUE && whole == width) return static_cast<const T*>(data) + first;
  with_stored<T>(type, [&](auto stored) {
    using E = decltype(stored);
    const E* from = static_cast<const E*>(data) + first;
    for (int64_t c = 0; c < whole; c += LANES<T>) store(room + c, load_as<T>(from + c));
    if (whole == width) return;
    store(room + whole, F<T>{});
    for (int64_t c = whole; c < width; ++c) room[c] = number_as<T>(from[c]);
  });
  return room;
}

// The first `count` lanes, at most all.
template <class T, class E>
inline void store_some(E* to, F<T> value, int64_t count) {
  if (count >= LANES<T>) return store_as<T>(to, value);
  for (int64_t lane = 0; lane < count; ++lane) to[lane] = number_from<E>(static_cast<T>(value[lane]));
}

// 1 / (1 + exp(-x)) and what it lacks to 1, which is exactly 0 where it is too small for a normal number.
template <class T>
struct Sigmoid {
  F<T> value, rest;
};

template <class T>
inline Sigmoid<T> sigmoid_of(F<T> x) {
  const F<T> size = (F<T>)((U<T>)x << 1 >> 1);  // without the sign
  const F<T> power = exp2<T>(size * static_cast<T>(-LOG2_E)), near = 1 / (1 + power), far = power * near;
  return {x < 0 ? far : near, x < 0 ? near : far};
}

template <class T>
inline F<T> sigmoid(F<T> x) {
  return sigmoid_of<T>(x).value;
}

// An activation and its derivative.
template <class T>
struct Bent {
  F<T> value, slope;
};

template <class T>
inline Bent<T> silu_of(F<T> x) {
  const Sigmoid<T> s = sigmoid_of<T>(x);
  return {x * s.value, s.value * (1 + x * s.rest)};
}

template <class T>
inline T sum_of(F<T> x) {
  T sum = 0;
  for (int lane = 0; lane < LANES<T>; ++lane) sum += x[lane];
  return sum;
}

// Column sums of the dense rows that units have left, in the order of the units, whoever made them: write(column, sum).
template <class T, class Write>
Status sum_rows(const Run& run, const T* data, int64_t rows, int64_t columns, Write write) {
  constexpr int64_t WIDTH = 64;
  struct Job {
    const T* data;
    int64_t rows, columns;
    Write& write;
  } job{data, rows, columns, write};
  const auto body = [](void* state, int64_t unit, Worker&) {
    const Job& job = *static_cast<Job*>(state);
    const int64_t first = unit * WIDTH, width = least(WIDTH, job.columns - first);
    double sums[WIDTH] = {};
    for (int64_t r = 0; r < job.rows; ++r) {
      const T* row = job.data + r * job.columns + first;
      for (int64_t c = 0; c < width; ++c) sums[c] += static_cast<double>(row[c]);
    }
    for (int64_t c = 0; c < width; ++c) job.write(first + c, static_cast<T>(sums[c]));
  };
  return qkv::parallel(run_for(run, rows * columns), blocks_of(columns, WIDTH), body, &job);
}

// (pass.*method)(unit, arena) for every unit; arenas hold `bytes`.
template <class Pass>
Status each_of(Pass& pass, const Run& run, int64_t units, size_t bytes, void (Pass::*method)(int64_t, Arena)) {
  struct Job {
    Pass& pass;
    void (Pass::*method)(int64_t, Arena);
    size_t bytes;
  } job{pass, method, bytes};
  const auto body = [](void* state, int64_t unit, Worker& worker) {
    const Job& job = *static_cast<Job*>(state);
    void* memory = worker.scratch(job.bytes);
    if (!memory) return worker.fail(Status::out_of_memory);
    (job.pass.*job.method)(unit, Arena(memory));
  };
  return qkv::parallel(run, units, body, &job);
}

}  // namespace
