"""The constructors of patterns: each checks its arguments and says, as a composition of leaves, which pairs exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from torch import Tensor

from qkv.errors import ShapeError, ValueOutOfRange, message, unknown_name
from qkv.patterns.arguments import integers, length, one_flag, seed_value
from qkv.patterns.expr import ALL, NONE, PerHead, conj, disj
from qkv.patterns.leaf import Expr
from qkv.patterns.leaves.blocks import BlockBand, RandomBlocks
from qkv.patterns.leaves.documents import Documents
from qkv.patterns.leaves.grid import Neighborhood, OnImage
from qkv.patterns.leaves.keys import Keys, PeriodicKeys, Rows, runs_of
from qkv.patterns.leaves.offsets import Congruent, Offsets
from qkv.patterns.pattern import Align, Pattern, combine
from qkv.patterns.spans import FAR
from qkv.patterns.writing import constructor, registered

CAUSAL = Offsets(0, FAR)


@registered
def full() -> Pattern:
    """Every pair: j is any key."""
    return Pattern(ALL, "full()")


@registered
def causal(align: Align | None = None) -> Pattern:
    """No key after the query: j <= i.

    align: where query 0 stands when L != S: "bottom_right" (also when None) at S - L,
    so that the last query sees the last
    key, or "top_left" at 0.
    """
    if align not in (None, "top_left", "bottom_right"):
        raise unknown_name("align", align, ["top_left", "bottom_right"])
    return Pattern(CAUSAL, f"causal(align={align!r})" if align else "causal()", align)


@constructor
def window(left: int | None, right: int | None = 0) -> Pattern:
    """i - left <= j <= i + right: left + 1 + right keys, the query's own included. None: no bound on that side."""
    low = -FAR if right is None else -length("right", right, 0)
    high = FAR if left is None else length("left", left, 0)
    text = f"window({left})" if right == 0 else f"window({left}, {right})"
    return Pattern(Offsets(low, high), text)


@constructor
def sliding_window(size: int) -> Pattern:
    """i - size < j <= i: causal, exactly `size` keys, the query's own included."""
    return Pattern(Offsets(0, length("size", size, 1) - 1), f"sliding_window({size})")


@constructor
def dilated(left: int, right: int = 0, *, dilation: int) -> Pattern:
    """j = i + m·dilation with -left <= m <= right: every dilation-th key of a window."""
    left, right, dilation = length("left", left, 0), length("right", right, 0), length("dilation", dilation, 1)
    sides = f"{left}" if right == 0 else f"{left}, {right}"
    reach = Offsets(max(-right * dilation, -FAR), min(left * dilation, FAR))
    return Pattern(conj(Congruent(dilation), reach), f"dilated({sides}, dilation={dilation})")


@constructor
def strided(stride: int) -> Pattern:
    """j <= i and (i - j < stride or (i - j) mod stride = 0): O(L·sqrt L) at stride ~ sqrt L.

    Source: Child, Gray, Radford, Sutskever, "Generating long sequences with sparse transformers" (2019), section 4.3.
    """
    return Pattern(_strided(length("stride", stride, 1)), f"strided({stride})")


@constructor
def sparse_transformer(stride: int) -> Pattern:
    """The strided pattern under the name of its paper: `strided(stride)`."""
    return Pattern(_strided(length("stride", stride, 1)), f"sparse_transformer({stride})")


@constructor
def fixed(block: int, summary: int = 1) -> Pattern:
    """j <= i and (the same block of `block` tokens, or j mod block >= block - summary: the block's last keys,
    seen by all later).

    Source: Child, Gray, Radford, Sutskever (2019), section 4.3.
    """
    block, summary = length("block", block, 1), length("summary", summary, 1)
    if summary > block:
        raise ValueOutOfRange(
            message(
                "`summary` must be at most `block`",
                f"got summary={summary}, block={block}",
                "use causal() for all keys",
            )
        )
    seen = disj(BlockBand(block, 0), PeriodicKeys(block, block - summary))
    return Pattern(conj(CAUSAL, seen), f"fixed({block})" if summary == 1 else f"fixed({block}, {summary})")


@constructor
def global_tokens(tokens: int | Sequence[int] | Tensor) -> Pattern:
    """Chosen tokens see all keys and are seen by all queries: i or j is one of them. An int n means the first n."""
    expr, text = _global(tokens)
    return Pattern(expr, f"global_tokens({text})")


@constructor
def prefix(n: int) -> Pattern:
    """j < n: the first n keys, for every query; `causal() | prefix(n)` is the prefix-LM."""
    return Pattern(_first_keys(length("n", n, 0)), f"prefix({n})")


@constructor
def random_blocks(count: int, block_size: int, seed: int, ahead: bool = False) -> Pattern:
    """For each block of queries, `count` distinct key blocks drawn at random among its own and earlier ones.

    ahead=True draws among all key blocks of the call. The draw is a pure function of (seed, block row):
    docs/patterns.md.
    """
    leaf = RandomBlocks(
        length("count", count, 1), length("block_size", block_size, 1), seed_value(seed), one_flag("ahead", ahead)
    )
    return Pattern(leaf, f"random_blocks({count}, {block_size}, {seed}{', ahead=True' if ahead else ''})")


@constructor
def block_local(size: int) -> Pattern:
    """The same block of `size` tokens: floor(i / size) = floor(j / size)."""
    return Pattern(BlockBand(length("size", size, 1), 0), f"block_local({size})")


@constructor
def neighborhood(shape: tuple[int, int], kernel: int) -> Pattern:
    """On a (height, width) image flattened by rows: the kernel·kernel window around i, shifted inward at the borders.

    Always kernel² keys. An even kernel reaches kernel/2 back and kernel/2 - 1 ahead.
    Source: Hassani, Walton, Li, Li, Shi, "Neighborhood attention transformer" (2023).
    """
    height, width = _image("neighborhood", shape)
    kernel = length("kernel", kernel, 1)
    if kernel > min(height, width):
        raise ValueOutOfRange(
            message(
                "`kernel` must fit into the image", f"got {kernel} for {height} by {width}", "use full() for all pixels"
            )
        )
    leaf = Neighborhood("neighborhood", height, width, kernel)
    return Pattern(leaf, f"neighborhood(({height}, {width}), {kernel})")


@constructor
def windows2d(shape: tuple[int, int], window: int, shift: int = 0) -> Pattern:
    """On an image: the same window·window tile after a cyclic shift up and left by `shift`, wrapped parts kept apart.

    Source: Liu and others, "Swin transformer" (2021), section 3.2.
    """
    height, width = _image("windows2d", shape)
    window, shift = length("window", window, 1), length("shift", shift, 0)
    if shift >= window:
        raise ValueOutOfRange(
            message(
                "`shift` must be less than `window`", f"got shift={shift}, window={window}", "Swin uses window // 2"
            )
        )
    across, down = _shifted_tiles(width, window, shift), _shifted_tiles(height, window, shift)
    numbers = (down[:, None] * (across.max() + 1) + across[None, :]).ravel()
    expr = conj(OnImage("windows2d", height, width), Documents(numbers, "windows2d"))
    text = f"windows2d(({height}, {width}), {window}{f', shift={shift}' if shift else ''})"
    return Pattern(expr, text)


@constructor
def axial(shape: tuple[int, int], along: Literal["width", "height"]) -> Pattern:
    """On an image: the same row of pixels (along="width") or the same column (along="height")."""
    height, width = _image("axial", shape)
    if along not in ("width", "height"):
        raise unknown_name("along", along, ["width", "height"])
    line = BlockBand(width, 0) if along == "width" else Congruent(width)
    return Pattern(conj(OnImage("axial", height, width), line), f"axial(({height}, {width}), {along!r})")


@constructor
def longformer(window: int, tokens: int | Sequence[int] | Tensor) -> Pattern:
    """|i - j| <= window // 2, or i or j is a global token.

    Source: Beltagy, Peters, Cohan, "Longformer" (2020).
    """
    half = length("window", window, 0) // 2
    seen, text = _global(tokens)
    return Pattern(disj(Offsets(-half, half), seen), f"longformer({window}, {text})")


@constructor
def bigbird(
    window: int, tokens: int | Sequence[int] | Tensor, random_blocks: int, seed: int, block_size: int = 64
) -> Pattern:
    """By blocks: at most window // 2 blocks apart, or a global token, or one of `random_blocks` blocks drawn among all.

    Source: Zaheer and others, "Big Bird" (2020).
    """
    size = length("block_size", block_size, 1)
    near = BlockBand(size, min(length("window", window, 0) // 2, FAR // size))
    count = length("random_blocks", random_blocks, 0)
    drawn = RandomBlocks(count, size, seed_value(seed), True) if count else NONE
    seen, text = _global(tokens)
    tail = "" if size == 64 else f", block_size={size}"
    return Pattern(disj(disj(near, seen), drawn), f"bigbird({window}, {text}, {count}, {seed}{tail})")


@registered
def per_head(patterns: Sequence[Pattern]) -> Pattern:
    """One pattern for each query head, H in all."""
    members = list(patterns) if isinstance(patterns, Sequence) else []
    if not members or not all(isinstance(member, Pattern) for member in members):
        raise ShapeError(
            message("`per_head` must list at least one pattern, nothing else", f"got {patterns!r}", "list one a head")
        )
    form = f"per_head([{', '.join(member.form for member in members)}])"
    return combine(members, form, lambda *exprs: PerHead(exprs))


def _strided(stride: int) -> Expr:
    return conj(CAUSAL, disj(Offsets(0, stride - 1), Congruent(stride)))


def _first_keys(n: int) -> Expr:
    return Keys(np.array([[0, n]], dtype=np.int64)) if n else NONE


def _global(tokens: int | Sequence[int] | Tensor) -> tuple[Expr, str]:
    if isinstance(tokens, int | np.integer):
        n = length("tokens", tokens, 0)
        runs, text = np.array([[0, n]], dtype=np.int64)[: int(n > 0)], str(n)
    else:
        members = np.unique(integers("tokens", tokens, ndim=(1,)))
        runs, text = runs_of(members), str(members.tolist())
    return (disj(Keys(runs), Rows(runs)) if len(runs) else NONE), text


def _image(name: str, shape: tuple[int, int]) -> tuple[int, int]:
    if not isinstance(shape, tuple | list) or len(shape) != 2:
        raise ShapeError(
            message(
                f"`{name}` must be given (height, width)",
                f"got {shape!r}",
                "write for example (32, 32) as the first argument",
            )
        )
    return length("height", shape[0], 1), length("width", shape[1], 1)


def _shifted_tiles(size: int, window: int, shift: int) -> np.ndarray:
    """The tile number along one axis of each pixel: the rolled coordinate's window, what wrapped around kept apart."""
    rolled = (np.arange(size) - shift) % size
    wrapped = np.arange(size) < shift
    return 2 * (rolled // window) + (wrapped & (shift > 0))
