// What a unit of bfloat16 products adds to an instruction set: the passes in pairs, and for all else those of that set.
#pragma once

#include "table.h"

#include "backward-inl.h"
#include "backward_pairs-inl.h"
#include "forward-inl.h"
#include "forward_pairs-inl.h"

namespace {

inline Status run_pairs_forward(const Problem& problem, const Forward& data, const Run& run) {
  if (problem.type != Type::bfloat16 || decodes(problem)) return QKV_BESIDE.forward(problem, data, run);
  return ForwardPass<PairForward>(problem, data).run(run);
}

inline Status run_pairs_backward(const Problem& problem, const qkv::Backward& data, const Run& run) {
  if (problem.type != Type::bfloat16) return QKV_BESIDE.backward(problem, data, run);
  return BackwardPass<PairBackward>(problem, data).run(run);
}

}  // namespace
