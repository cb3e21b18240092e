// The kernels of the linear family, as one instruction set compiles them; as in target-inl.h, nothing of them may be
// linked in place of another's.
#pragma once

#include "table.h"

#include "convolution-inl.h"
#include "norms-inl.h"
#include "projection-inl.h"
#include "recurrence-inl.h"
#include "recurrence_backward-inl.h"
