"""Relative positions as biases of the scores: T5's learned buckets of distances and ALiBi's slopes.

Both give values of `qkv.scores`, which `qkv.attention` takes as `bias=`: no (L, S) tensor is made.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from qkv.cache.arguments import read_size
from qkv.errors import ValueOutOfRange, message
from qkv.patterns.arguments import one_flag
from qkv.scores import Alibi, Relative, alibi, alibi_slopes, relative


class T5RelativeBias(nn.Module):
    """A learned number for each head and bucket of distances, added to the scores.

    Of n buckets for one direction the first n // 2 = e hold one distance each; the others grow in proportion to the
    distance: d falls into bucket e + ⌊ln(d/e) / ln(max_distance/e) · (n - e)⌋, and all from `max_distance` on into the
    last. `bidirectional` (an encoder) gives keys behind and ahead half of the `buckets` each; else (a decoder) keys
    behind have all of them, and keys ahead, which a causal pattern hides, share bucket 0.

    weight: (buckets, heads), as `relative_attention_bias.weight` of published files; drawn from N(0, 1/√dim) there and
    from N(0, 0.02²) here, where no dim is known. T5 adds it to scores that are not scaled: call with scale=1.0.

    Source: Raffel et al., arXiv:1910.10683, section 2.1.

    >>> T5RelativeBias(4)()
    relative(4 heads, radius 128)
    """

    def __init__(self, heads: int, *, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> None:
        super().__init__()
        self.bidirectional = one_flag("bidirectional", bidirectional)
        self.max_distance = read_size("max_distance", max_distance, 1)
        self._buckets = _buckets(read_size("buckets", buckets, 1), self.max_distance, self.bidirectional)
        self.weight = nn.Parameter(torch.empty(buckets, read_size("heads", heads, 1)))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self) -> Relative:
        """The bias as it stands now; a gradient reaches `weight`. One call serves all layers of a pass."""
        buckets = torch.from_numpy(self._buckets).to(self.weight.device)
        return relative(nn.functional.embedding(buckets, self.weight).t())

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        buckets, heads = self.weight.shape
        return f"{heads}, buckets={buckets}, max_distance={self.max_distance}, bidirectional={self.bidirectional}"


class AlibiBias(nn.Module):
    """The bias -slope·|i - j| with the paper's slopes, 2^(-8h/H) for heads h = 1 .. H; nothing is learned.

    Source: Press et al., arXiv:2108.12409, section 3.

    >>> AlibiBias(8)()
    alibi(8 heads)
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self._bias = alibi(alibi_slopes(heads))

    def forward(self) -> Alibi:
        return self._bias

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        return f"{self._bias.heads}"


def _buckets(count: int, max_distance: int, bidirectional: bool) -> np.ndarray:
    """The bucket of each distance j - i = -max_distance .. max_distance."""
    ways = 2 if bidirectional else 1
    one_way = count // ways
    if count % ways or one_way < 2 or max_distance <= one_way // 2:
        raise ValueOutOfRange(
            message(
                f"`buckets` must be {'even and at least 4' if bidirectional else 'at least 2'}, "
                "and half of those of one direction below `max_distance`",
                f"got {count} and {max_distance}",
                "T5 has 32 and 128",
            )
        )
    behind = np.array(_one_way(one_way, max_distance))
    ahead = behind[1:] + one_way if bidirectional else np.zeros(max_distance, dtype=np.int64)
    return np.concatenate((behind[::-1], ahead))


def _one_way(count: int, max_distance: int) -> list[int]:
    """The bucket of each distance 0 .. max_distance, by whole numbers: no logarithm decides a tie.

    ln(d/e) / ln(M/e) · n ≥ k where (d/e)^n ≥ (M/e)^k.
    """
    exact = count // 2
    wide = count - exact
    found, k = list(range(exact)), 0
    for distance in range(exact, max_distance + 1):
        while k + 1 < wide and distance**wide * exact ** (k + 1) >= max_distance ** (k + 1) * exact**wide:
            k += 1
        found.append(exact + k)
    return found
