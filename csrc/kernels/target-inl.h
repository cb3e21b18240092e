// All kernels, as one instruction set compiles them. Everything is in anonymous namespaces and nothing of the standard
// library's templates is used, so that no function of one instruction set can be linked in place of another's.
#pragma once

#include "table.h"

#include "backward-inl.h"
#include "forward-inl.h"
