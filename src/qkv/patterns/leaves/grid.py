"""Leaves on an image flattened row by row: neighbourhoods, and the size check that rows, columns and tiles share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qkv.errors import ShapeError, message
from qkv.patterns import spans
from qkv.patterns.leaf import LISTED, Intervals, Leaf, Sizes, Tiles
from qkv.patterns.spans import Spans


@dataclass(frozen=True, eq=False)
class OnImage(Leaf):
    """True for every pair; its check demands that the call's keys are the height by width pixels of an image."""

    name: str
    height: int
    width: int

    @property
    def key(self) -> tuple[object, ...]:
        return ("on_image", self.height, self.width)

    def check(self, sizes: Sizes) -> None:
        if sizes.keys != self.height * self.width:
            pixels = f"{self.height}·{self.width} = {self.height * self.width}"
            raise ShapeError(
                message(
                    f"`{self.name}` must be called with S = {pixels} keys",
                    f"S={sizes.keys}",
                    "flatten the image row by row, without extra tokens",
                )
            )

    def contains(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        pixels = self.height * self.width
        return (i >= 0) & (i < pixels) & (j >= 0) & (j < pixels)

    def intervals(self, low: np.ndarray, high: np.ndarray) -> tuple[Intervals, Intervals]:
        pixels = self.height * self.width
        touching = np.flatnonzero((low < pixels) & (high >= 0))
        inside = np.flatnonzero((low >= 0) & (high < pixels))
        maybe, sure = (Intervals(o, np.zeros_like(o), np.full_like(o, pixels)) for o in (touching, inside))
        return maybe, sure

    def seen(self, low: int, high: int) -> tuple[Spans, Spans]:
        pixels = self.height * self.width
        if high < 0 or low >= pixels:
            return spans.NOTHING, spans.NOTHING
        maybe = (0, pixels)
        return maybe, maybe if low >= 0 and high < pixels else spans.NOTHING


@dataclass(frozen=True, eq=False)
class Neighborhood(OnImage):
    """The kernel x kernel window around i, shifted inward at the borders; even kernels reach one further back."""

    kernel: int

    @property
    def key(self) -> tuple[object, ...]:
        return ("neighborhood", self.height, self.width, self.kernel)

    def _window(self, place: np.ndarray, size: int) -> np.ndarray:
        """Where the window of each coordinate starts."""
        return np.clip(place - self.kernel // 2, 0, size - self.kernel)

    def contains(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        top, left = self._window(i // self.width, self.height), self._window(i % self.width, self.width)
        down, across = j // self.width - top, j % self.width - left
        near = (down >= 0) & (down < self.kernel) & (across >= 0) & (across < self.kernel)
        return near & super().contains(i, j)

    def intervals(self, low: np.ndarray, high: np.ndarray) -> tuple[Intervals, Intervals]:
        """Whole rows of pixels as a first bound, then, for a segment within one row of pixels,
        each row's own window.
        """
        pixels, width = self.height * self.width, self.width
        low, high = np.clip(low, 0, pixels - 1), np.clip(high, 0, pixels - 1)
        top, bottom = self._window(low // width, self.height), self._window(high // width, self.height)
        one_row = low // width == high // width
        left = np.where(one_row, self._window(low % width, width), 0)
        right = np.where(one_row, self._window(high % width, width) + self.kernel, width)
        counts = bottom + self.kernel - top
        owner = np.repeat(np.arange(len(low)), counts)
        row = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts) + top[owner]
        return Intervals(owner, row * width + left[owner], row * width + right[owner]), Intervals.nothing()

    def seen(self, low: int, high: int) -> tuple[Spans, Spans]:
        maybe, sure = Leaf.seen(self, low, high)
        itself = low == high and 0 <= low < self.height * self.width and self.kernel <= LISTED
        return maybe, maybe if itself else sure

    def signature(self, tiles: Tiles) -> tuple[np.ndarray, ...]:
        """Away from the upper and lower border only the column and the distance count."""
        y = tiles.query_first // self.width
        rows_in_block = tiles.query_reach // self.width + 1
        before, after = self.kernel // 2, self.kernel - self.kernel // 2
        interior = (y >= before) & (y + rows_in_block + after <= self.height)
        return (
            tiles.query_shape,
            tiles.key_shape,
            tiles.query_first % self.width,
            np.where(interior, -1, y),
            tiles.distance,
        )
