"""Feature maps without parameters: softmax features, the second-order Taylor series, and random features (FAVOR+).

All are computed in float32 for 16-bit inputs, in float64 for float64, and stay in that type: features rounded to
bfloat16 would cost every weight 2⁻⁸ of itself, and those of FAVOR+ leave the range of float16.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from qkv.backends.base import without_autocast
from qkv.linear.recurrence import compute_dtype
from qkv.philox import philox

# Exponents of FAVOR+ are kept between these. Products of two features lie in e⁻⁸⁰ .. e⁷²: normal numbers of float32,
# with room for a sum over 8 million keys; a feature at the floor is lost in float32's roundoff of any ordinary one.
FLOOR, CEILING = -40.0, 36.0
FAVOR_SEED = 0


def widened(x: Tensor) -> Tensor:
    """The input in the type that features are computed in: float64 as it is, float32 for all others."""
    return x.to(compute_dtype(x.dtype))


def softmax_features(x: Tensor) -> Tensor:
    """[softmax(x), softmax(-x)], (..., 2 D)."""
    x = widened(x)
    return torch.cat([x.softmax(dim=-1), (-x).softmax(dim=-1)], dim=-1)


def taylor_features(x: Tensor) -> Tensor:
    """The features of TaylorFeatures, (..., 1 + D + D(D + 1)/2)."""
    width = x.shape[-1]
    i, j = torch.triu_indices(width, width, 1, device=x.device)
    x = widened(x) * width**-0.25
    pairs = x.index_select(-1, i) * x.index_select(-1, j)
    return torch.cat([torch.ones_like(x[..., :1]), x, pairs, x * x * math.sqrt(0.5)], dim=-1)


def favor_features(x: Tensor, projection: Tensor) -> Tensor:
    """The features of FavorFeatures for given rows (M, D), (..., M)."""
    y = widened(x) * x.shape[-1] ** -0.25
    with without_autocast(y.device):  # which would round the exponents to 16 bits
        along = y @ projection.to(y.device, y.dtype).mT
    exponent = along - y.square().sum(dim=-1, keepdim=True) / 2
    return exponent.clamp(FLOOR, CEILING).exp() * projection.shape[0] ** -0.5


def favor_by_name(x: Tensor) -> Tensor:
    """What the name "favor" stands for: 4 D features of seed 0."""
    return favor_features(x, _projection_by_name(x.shape[-1]))


class SoftmaxFeatures(nn.Module):
    """phi(x) = [softmax(x), softmax(-x)] over the D entries of x: 2 D numbers in 0 .. 1.

    The mirrored half lets two vectors agree by their small entries too; `mirrored=False` is softmax(x) alone.
    """

    def __init__(self, *, mirrored: bool = True) -> None:
        super().__init__()
        self.mirrored = mirrored

    def forward(self, x: Tensor) -> Tensor:
        return softmax_features(x) if self.mirrored else widened(x).softmax(dim=-1)

    def extra_repr(self) -> str:
        """Options, for printing."""
        return f"mirrored={self.mirrored}"


class TaylorFeatures(nn.Module):
    """phi(q)·phi(k) = 1 + z + z²/2 with z = q·k/√D: the series of exp(z) to second order.

    Features: 1; x_i / D^¼; x_i x_j / √D for i < j; x_i² / √(2 D): 1 + D + D(D + 1)/2 of them. Single ones have both
    signs, yet the weight of a pair is at least ½, so that a denominator never comes near 0. Meant for small D: 16 gives
    153 features, 64 gives 2145.

    Source: Arora et al., "Simple linear attention language models balance the recall-throughput tradeoff" (2024).
    """

    def forward(self, x: Tensor) -> Tensor:
        return taylor_features(x)


class FavorFeatures(nn.Module):
    """FAVOR+: positive orthogonal random features, whose product is exp(q·k/√D) in expectation.

        phi(x)_i = exp(w_i·y - |y|²/2) / √M,   y = x / D^¼,   i = 1 .. M

    The rows w_i are orthogonal in blocks of D, with lengths drawn anew as those of Gaussian vectors (chi of D degrees).
    An unbiased estimate of the softmax kernel, with an error that falls as 1/√M and grows fast with |q||k|; never exact
    softmax. Exact is what linear attention does with these features.

    No maximum over keys is subtracted: that of later keys would reach earlier queries. Instead the exponent is kept in
    -40 .. 36, so that features depend on their own token alone, never overflow and are never 0. Ordinary exponents lie
    around -√D / 2, well inside. Those of a long token, |x|² beyond about 80 √D, all meet the floor: it weighs next to
    nothing beside ordinary ones, and the same as others of its kind.

    `features` is M, 4 D by default. `seed` decides the rows by a fixed rule (Philox), alike on every machine up to
    rounding. `projection` (M, D) is a buffer, saved with the module; `redraw(seed)` draws other rows in place.

    Source: Choromanski et al., "Rethinking attention with Performers" (2021), section 2.
    """

    projection: Tensor

    def __init__(self, head_dim: int, features: int | None = None, seed: int = FAVOR_SEED) -> None:
        super().__init__()
        self.seed = seed
        rows = orthogonal_rows(4 * head_dim if features is None else features, head_dim, seed)
        self.head_dim = head_dim
        self.register_buffer("projection", torch.from_numpy(rows).to(torch.float32))

    def redraw(self, seed: int) -> None:
        """Other rows, in place. States made with the old ones no longer fit."""
        self.seed = seed
        features, head_dim = self.projection.shape
        rows = orthogonal_rows(features, head_dim, seed)
        self.projection.copy_(torch.from_numpy(rows))

    def forward(self, x: Tensor) -> Tensor:
        return favor_features(x, self.projection)

    def extra_repr(self) -> str:
        """Sizes and seed, for printing."""
        features, head_dim = self.projection.shape
        return f"head_dim={head_dim}, features={features}, seed={self.seed}"


def orthogonal_rows(rows: int, width: int, seed: int) -> npt.NDArray[np.float64]:
    """Random vectors (rows, width), each Gaussian by itself, orthogonal within blocks of `width` rows."""
    blocks = -(-rows // width)
    draws = gaussian(2 * blocks * width * width, seed).reshape(2, blocks, width, width)
    directions, triangle = np.linalg.qr(draws[0])
    # The signs of the diagonal make directions uniform over all rotations, whatever the factorisation chooses.
    directions = directions * np.copysign(1, np.diagonal(triangle, axis1=-2, axis2=-1))[..., None, :]
    lengths = np.linalg.norm(draws[1], axis=-1, keepdims=True)
    return (directions.mT * lengths).reshape(-1, width)[:rows]


@lru_cache(maxsize=64)
def _rows_by_name(width: int) -> npt.NDArray[np.float64]:
    """Kept as numbers, since a tensor would keep the modes of the call that made it."""
    return orthogonal_rows(4 * width, width, FAVOR_SEED)


def _projection_by_name(width: int) -> Tensor:
    return torch.from_numpy(_rows_by_name(width)).to(torch.float32)


# As torch.compiler.assume_constant_result, which loads the whole compiler: a graph takes the result as it is.
vars(_projection_by_name)["_dynamo_marked_constant"] = True


def gaussian(count: int, seed: int) -> npt.NDArray[np.float64]:
    """Standard normal numbers by Box and Muller, four from the words of each `philox(seed, n, 0, 0, 0)`, n = 0, 1 .."""
    zero = np.zeros(1, dtype=np.int64)
    words = np.stack(philox(seed, np.arange(-(-count // 4), dtype=np.int64), zero, zero, zero))
    radius = np.sqrt(-2 * np.log((words[:2] + 1) / 2**32))
    angle = words[2:] * (2 * math.pi / 2**32)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)]).T.reshape(-1)[:count]
