// The kernels in use.
#pragma once

#include "kernels/table.h"

namespace qkv {

// Null: the processor has none of the instruction sets built, or QKV_ISA names one that is not available.
const Kernels* kernels();

}  // namespace qkv
