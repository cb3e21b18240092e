"""Philox4x32-10: a counter-based generator, so that a random number is a pure function of a key and a place.

Works on int64 arrays of NumPy or torch alike: the low 64 bits of a product do not depend on the sign.
Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from torch import Tensor

Array = TypeVar("Array", np.ndarray, Tensor)

WORD = 0xFFFFFFFF
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10


def philox(seed: int, c0: Array, c1: Array, c2: Array, c3: Array) -> tuple[Array, Array, Array, Array]:
    """Four 32-bit words, as int64, for every counter (c0, c1, c2, c3); the 64-bit `seed` is the key, low half first.

    The counters are int64 arrays of any shapes that broadcast, of at least one axis each, and are taken mod 2^32.
    """
    key_0, key_1 = seed & WORD, (seed >> 32) & WORD
    c0, c1, c2, c3 = c0 & WORD, c1 & WORD, c2 & WORD, c3 & WORD
    for _ in range(ROUNDS):
        product_0, product_1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0, c1, c2, c3 = (
            ((product_1 >> 32) & WORD) ^ c1 ^ key_0,
            product_1 & WORD,
            ((product_0 >> 32) & WORD) ^ c3 ^ key_1,
            product_0 & WORD,
        )
        key_0, key_1 = (key_0 + WEYL_0) & WORD, (key_1 + WEYL_1) & WORD
    return c0, c1, c2, c3
