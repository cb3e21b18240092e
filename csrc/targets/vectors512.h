// Vectors of 512 bits, for all that have AVX-512.
#pragma once

#define QKV_BYTES 64  // of a vector
#define QKV_PANEL 4  // vectors of a panel, and rows of a strip beside it: what the registers hold
#define QKV_STRIP 6
