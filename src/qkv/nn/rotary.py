"""Rotary positions: pairs of channels of a query or key turn by an angle in proportion to the token's position.

The score of a query and a key, their product, then depends on the distance of their positions alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qkv.backends.autograd import in_operations
from qkv.cache.arguments import read_size
from qkv.errors import DTypeError, ShapeError, ValueOutOfRange, message
from qkv.linear.fused import has_tangents
from qkv.linear.recurrence import compute_dtype
from qkv.nn.ids import check_positions
from qkv.nn.rotary_config import read_rotary
from qkv.nn.rotary_scaling import Scaling, check_positive, plain_frequencies
from qkv.patterns.arguments import one_flag
from qkv.shapes import values_can_be_seen

SMALL = 1 << 15  # numbers of x up to which few calls count for more than few passes over memory
BLOCK = 1 << 18  # numbers of x turned at a time: a second pass finds them in the cache


class Rotation(NamedTuple):
    """The angles of some tokens, made once for all layers of a pass; W is the rotated width.

    The turned x is x · cos + swapped x · sin, where swapping exchanges the two channels of each pair.
    """

    cos: Tensor  # (L, 1, W) or (B, L, 1, W), float32, or float64 for float64
    sin: Tensor  # the same; negative at the first channel of each pair


class Rotary(nn.Module):
    """Rotary position embedding of queries and keys (B, L, H, D).

    Of the first W = `width` channels (all D by default; fewer in GPT-NeoX, GPT-J and Phi) pair m = 0 .. W/2 - 1 turns
    by the angle position · base^(-2m/W):

        y_a = x_a cos - x_b sin,   y_b = x_b cos + x_a sin

    where the pair (a, b) is (m, m + W/2), as in Llama and GPT-NeoX, or with `interleaved` (2m, 2m + 1), as in RoFormer
    and GPT-J. `scaling` stretches the angles: LinearScaling, NtkScaling, Llama3Scaling or YarnScaling.

    Angles are computed in float64, at positions up to any length, and rounded once; the rotation is in float32
    (float64 for float64), rounded to the type of x. There are no parameters and no buffers.

    Source: Su et al., RoFormer, arXiv:2104.09864, equation 34.

    >>> rotary = Rotary(64)
    >>> rotation = rotary.angles(torch.arange(10), torch.float32)
    >>> rotary(torch.randn(2, 10, 8, 64), rotation).shape
    torch.Size([2, 10, 8, 64])
    """

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10000.0,
        interleaved: bool = False,
        width: int | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = read_size("head_dim", head_dim, 2)
        self.width = self.head_dim if width is None else read_size("width", width, 2)
        if self.width % 2 or self.width > self.head_dim:
            holds = f"`width` must be even and at most head_dim = {self.head_dim}"
            raise ValueOutOfRange(message(holds, f"got {self.width}", "channels turn in pairs"))
        check_positive(base=base)
        if scaling is not None and not isinstance(scaling, Scaling):
            seen = f"got {scaling!r}"
            raise DTypeError(message("`scaling` must be a Scaling or None", seen, "make one, as by LinearScaling(2.0)"))
        self.base = float(base)
        self.interleaved = one_flag("interleaved", interleaved)
        self.scaling = scaling
        self.amplitude = 1.0 if scaling is None else scaling.amplitude()
        # numpy's, radians a token: a tensor made while a model is built on the meta device would hold no numbers
        self.frequencies = (
            plain_frequencies(self.base, self.width) if scaling is None else scaling.frequencies(self.base, self.width)
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], head_dim: int, *, interleaved: bool = False) -> Rotary:
        """That of a published model, from the fields of its config.json: `rope_parameters`, or in older files
        `rope_theta`, `rope_scaling`, `partial_rotary_factor`, `rotary_pct`, `rotary_dim`.

        Kinds "default", "linear", "llama3" and "yarn" are read; "dynamic" and "longrope" are refused, because they
        turn keys anew as a sequence grows. Whether pairs lie interleaved no config tells: it is the model's code.
        Raises CheckpointError, UnsupportedError or UnknownName.

        >>> Rotary.from_config({"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 64)
        Rotary(64, base=500000.0, scaling=LinearScaling(factor=4.0))
        """
        base, width, scaling = read_rotary(config, head_dim)
        return cls(head_dim, base=base, interleaved=interleaved, width=width, scaling=scaling)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """The rotation of tokens at these positions, on their device.

        positions: integers (L,), or (B, L) where the rows of a batch differ. dtype: of what will be turned.
        """
        check_positions(positions)
        frequencies = torch.as_tensor(self.frequencies, device=positions.device)
        angles = positions.unsqueeze(-1) * frequencies  # (..., L, W/2)
        cos, sin = angles.cos(), angles.sin()
        if self.amplitude != 1.0:
            cos, sin = cos * self.amplitude, sin * self.amplitude
        cos, sin = (part.to(compute_dtype(dtype)) for part in (cos, sin))
        if self.interleaved:
            cos, sin = torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2)
        else:
            cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return Rotation(cos.unsqueeze(-2), sin.unsqueeze(-2))

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """x (B, L, H, D) turned, in its type; a gradient reaches x. rotation: of its tokens, from `angles`."""
        if x.ndim != 4 or x.shape[-1] != self.head_dim:
            holds = f"`x` must be (B, L, H, D) with D = {self.head_dim}"
            raise ShapeError(message(holds, f"got {tuple(x.shape)}", "split the width into heads with unflatten"))
        _check_rotation(x, rotation, self.width)
        if x.numel() <= SMALL or not x.is_cpu or not values_can_be_seen(x) or has_tangents(x):
            return _turned(x, *rotation, self.interleaved)
        if torch.is_grad_enabled() and x.requires_grad:
            turned: Tensor = _Turn.apply(x, *rotation, self.interleaved)  # type: ignore[no-untyped-call]
            return turned
        return _turned_by_blocks(x, *rotation, self.interleaved)

    def both(self, query: Tensor, key: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Query (B, L, H, D) and key (B, L, G, D) of the same tokens turned: as one tensor where they are small."""
        if query.numel() + key.numel() > SMALL or query.dtype != key.dtype:
            return self(query, rotation), self(key, rotation)
        heads = query.shape[2]
        turned = self(torch.cat((query, key), 2), rotation)
        return turned[:, :, :heads], turned[:, :, heads:]

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        said = [f"{self.head_dim}", f"base={self.base}"]
        said += [f"width={self.width}"] if self.width < self.head_dim else []
        said += ["interleaved=True"] if self.interleaved else []
        said += [f"scaling={self.scaling}"] if self.scaling is not None else []
        return ", ".join(said)


def _check_rotation(x: Tensor, rotation: Rotation, width: int) -> None:
    """Raise where the angles are those of other tokens, or of a rotary of another width."""
    sizes = rotation.cos.shape
    legal = (x.shape[1], 1, width), (x.shape[0], x.shape[1], 1, width)
    if sizes not in legal:
        holds = f"`rotation` must be of the tokens of `x`: {' or '.join(map(str, legal))}"
        remedy = "make it by `angles(positions, dtype)` of this rotary, with one position a token"
        raise ShapeError(message(holds, f"got {tuple(sizes)}", remedy))


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The rotation in few calls, as torch operations that differentiate in any way."""
    width = cos.shape[-1]
    wide = x if width == x.shape[-1] else x[..., :width]
    if x.dtype != cos.dtype:
        wide = wide.to(compute_dtype(x.dtype))
    swapped = wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if interleaved else wide.roll(width // 2, -1)
    turned = torch.addcmul(wide * cos, swapped, sin)
    if x.dtype != cos.dtype:
        turned = turned.to(x.dtype)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), -1)


def _turned_by_blocks(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The same with fewer passes over memory, some tokens at a time; without a graph."""
    width = cos.shape[-1]
    turned = torch.empty_like(x, memory_format=torch.contiguous_format)
    if width < x.shape[-1]:
        turned[..., width:] = x[..., width:]
    tokens = max(1, BLOCK * x.shape[1] // x.numel())
    parts = (x[..., :width].split(tokens, 1), turned[..., :width].split(tokens, 1))
    for part, out, c, s in zip(*parts, cos.split(tokens, -3), sin.split(tokens, -3), strict=True):
        wide = part.to(compute_dtype(x.dtype))
        made = _turn_pairs(wide, c, s) if interleaved else _turn_halves(wide, c, s, out)
        if made is not out:
            out.copy_(made)
    return turned


def _turn_halves(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    """Pairs (m, m + W/2), into `out` where it has the type."""
    made = torch.mul(x, cos, out=out if out.dtype == x.dtype == cos.dtype else None)
    for half, other, s in zip(made.chunk(2, -1), reversed(x.chunk(2, -1)), sin.chunk(2, -1), strict=True):
        half.addcmul_(other, s)
    return made


def _turn_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (2m, 2m + 1), as products of complex numbers."""
    pairs = torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.complex(cos[..., ::2], sin[..., 1::2])).flatten(-2)


class _Turn(torch.autograd.Function):
    """The rotation by blocks; its gradient is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turned_by_blocks(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        if in_operations(grad):
            return _turned(grad, cos, -sin, ctx.interleaved), None, None, None
        return _turned_by_blocks(grad, cos, -sin, ctx.interleaved), None, None, None
