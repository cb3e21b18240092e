// Running a pass: units of work over the pool, each with scratch of its own.
#pragma once

#include "../base/threads.h"
#include "memory-inl.h"
#include "walk-inl.h"

namespace {

using qkv::Problem;
using qkv::Run;
using qkv::Status;
using qkv::Worker;

constexpr int64_t TOGETHER = 4;  // query tiles that share each block of keys and values on its way through the caches

// (pass.*method)(unit, scratch, worker) for every unit. A Scratch is made from the problem and an arena, in which it
// takes its pieces, and then prepared.
template <class Pass, class Asked, class Scratch>
Status each(Pass& pass, const Asked& problem, const Run& run, int64_t units,
            void (Pass::*method)(int64_t, Scratch&, Worker&)) {
  struct Job {
    Pass& pass;
    const Asked& problem;
    void (Pass::*method)(int64_t, Scratch&, Worker&);
    size_t bytes;
  };
  Arena measure(nullptr);
  Scratch(problem, measure);
  Job job{pass, problem, method, measure.used()};
  const auto body = [](void* state, int64_t unit, Worker& worker) {
    const Job& job = *static_cast<Job*>(state);
    void* memory = worker.scratch(job.bytes);
    if (!memory) return worker.fail(Status::out_of_memory);
    Arena arena(memory);
    Scratch scratch(job.problem, arena);
    scratch.prepare(job.problem);
    (job.pass.*job.method)(unit, scratch, worker);
  };
  return qkv::parallel(run, units, body, &job);
}

inline const qkv::Member& member_of(const Problem& problem, int64_t b, int64_t h) {
  const qkv::Plan& plan = problem.plan;
  return plan.members[plan.index[b * plan.index_batch_stride + h * plan.index_head_stride]];
}

// The first key block that any of some tiles still has to see.
template <class Tile>
int64_t next_block(const Tile* tiles, int64_t count) {
  int64_t block = NO_BLOCK;
  for (int64_t i = 0; i < count; ++i) block = least(block, tiles[i].cursor.block());
  return block;
}

// The greatest sizes among the members of a plan.
struct PlanSize {
  int64_t parts = 0, tiles = 0, blocks = 0;
  bool merged = false;  // whether a state has to wait between parts, or some rows are in none

  explicit PlanSize(const qkv::Plan& plan) {
    for (int64_t m = 0; m < plan.count; ++m) {
      const qkv::Member& member = plan.members[m];
      parts = most(parts, member.count);
      merged = merged || member.count != 1 || member.parts[0].query_rows;
      for (int64_t i = 0; i < member.count; ++i) {
        tiles = most(tiles, member.parts[i].schedule.rows);
        blocks = most(blocks, member.parts[i].schedule.cols);
      }
    }
  }
};

}  // namespace
