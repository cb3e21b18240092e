"""Every error class has an example that a user can meet, and every example's text has its three parts."""

from __future__ import annotations

import inspect

import pytest
import torch

import qkv
from qkv import errors
from qkv.errors import QkvError, message, unknown_name
from qkv.tensorfile import read_tensors

L, D = 3, 4


def attend(**options):
    """A small legal call with what is given changed."""
    made = {"query": torch.zeros(1, 2, L, D), "key": torch.zeros(1, 2, L, D), "value": torch.zeros(1, 2, L, D)}
    return qkv.attention(**{**made, **options})


def wide(*shape):
    return torch.zeros(1, device="meta").expand(*shape)


def read_nonsense(folder):
    file = folder / "model.safetensors"
    file.write_bytes(b"no tensors here")
    return read_tensors(file)


# Each class with one call that raises it (given a folder to write in), and words of its text.
EXAMPLES = {
    errors.ShapeError: (lambda _: attend(key=torch.zeros(1, 2, L, 5)), "same width D"),
    errors.MaskError: (lambda _: attend(bias=torch.ones(L, L, dtype=torch.bool)), "mask(keep=...)"),
    errors.ValueOutOfRange: (lambda _: attend(scale=float("nan")), "`scale` must be finite; got nan"),
    errors.LayoutError: (lambda _: attend(pattern=qkv.causal(align="top_left"), query_offset=2), "query_offset=2"),
    errors.DTypeError: (lambda _: attend(query=[[1.0]]), "`query` must be a torch.Tensor"),
    errors.DeviceError: (lambda _: attend(key=torch.zeros(1, 2, L, D, device="meta")), "device of `query`"),
    errors.UnsupportedError: (lambda _: attend(backend="sdpa", softcap=30.0), "softcap"),
    errors.SizeLimit: (
        lambda _: attend(query=wide(1, 1, 2**33, 1), key=wide(1, 1, 2, 1), value=wide(1, 1, 2, 2**30)),
        "below 2^63",
    ),
    errors.UnknownName: (lambda _: attend(backend="blockwse"), "did you mean 'blockwise'?"),
    errors.PatternSyntaxError: (lambda _: qkv.parse("nonsense("), "nonsense("),
    errors.CheckpointError: (read_nonsense, "model.safetensors"),
}
WARNINGS = {
    errors.InvertedMaskWarning: (lambda _: attend(pattern=~qkv.full()), "invert"),
    errors.AddedMaskWarning: (lambda _: attend(bias=torch.eye(L)), "added to the scores"),
}


def classes(root):
    return {
        c
        for _, c in inspect.getmembers(errors, inspect.isclass)
        if issubclass(c, root) and c.__module__ == "qkv.errors"
    }


def test_every_class_has_an_example():
    assert classes(QkvError) - {QkvError} == set(EXAMPLES)
    assert classes(Warning) == set(WARNINGS)


@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)
def test_example_raises_its_class_in_three_parts(kind, tmp_path):
    make, words = EXAMPLES[kind]
    with pytest.raises(QkvError) as caught:
        make(tmp_path)
    assert type(caught.value) is kind
    assert words in str(caught.value)
    assert str(caught.value).count("; ") >= 2


@pytest.mark.parametrize("kind", WARNINGS, ids=lambda kind: kind.__name__)
def test_example_warns_in_three_parts(kind, tmp_path):
    make, words = WARNINGS[kind]
    with pytest.warns(kind) as caught:
        make(tmp_path)
    (warning,) = caught
    assert words in str(warning.message)
    assert str(warning.message).count("; ") >= 2
    assert warning.filename == __file__, "a warning points at the caller's line"


def test_every_error_is_a_builtin_one_too():
    """So that a caller need not know this package to catch a wrong value."""
    for kind in EXAMPLES:
        assert issubclass(kind, (ValueError, TypeError, NotImplementedError)), kind


def test_message_joins_three_parts():
    assert message("a must hold", "got b", "do c") == "a must hold; got b; do c"


@pytest.mark.parametrize(
    "name, remedy",
    [("blockwse", "did you mean 'blockwise'?"), ("zzz", "choose one of these"), (None, "choose one of these")],
)
def test_unknown_name_offers_the_nearest(name, remedy):
    text = str(unknown_name("backend", name, ["reference", "blockwise"]))
    assert text == f"`backend` must be one of blockwise, reference; got {name!r}; {remedy}"
