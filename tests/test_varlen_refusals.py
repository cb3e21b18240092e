"""What packed calls refuse: boundaries that are none, what does not fit a document, and graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._subclasses.fake_tensor import FakeTensorMode

import qkv
from packs import CU, LENGTHS, H, V, inputs
from qkv.errors import DTypeError, MaskError, QkvError, ShapeError, UnsupportedError, ValueOutOfRange
from qkv.varlen import varlen_attention

Q, K, VALUE = inputs(torch.float32)
REFUSED: dict[str, tuple[type[QkvError], str, dict[str, Any]]] = {
    "no end": (ValueOutOfRange, "`cu_seqlens_q` must end at the 272 rows of `query`", {"cu_seqlens_q": [0, 5]}),
    "beyond the end": (ValueOutOfRange, "its last entry is 273", {"cu_seqlens_q": [0, 273]}),
    "beyond the keys": (
        ValueOutOfRange,
        "must end at the 272 rows of `key`",
        {"cu_seqlens_k": [0, 1, 2, 3, 4, 5, 999]},
    ),
    "late start": (ValueOutOfRange, "must start at 0; entry 0 is 2", {"cu_seqlens_q": [2, 272]}),
    "falling": (ValueOutOfRange, "must not decrease; entry 2 is 7 after 9", {"cu_seqlens_q": [0, 9, 7, 272]}),
    "negative": (ValueOutOfRange, "entry [1] is -3", {"cu_seqlens_q": torch.tensor([0, -3, 272])}),
    "huge": (ValueOutOfRange, "must lie in 0..2**31 - 1", {"cu_seqlens_q": torch.tensor([0, 2**62, 272])}),
    "empty": (ShapeError, "must hold at least the boundary 0", {"cu_seqlens_q": []}),
    "two axes": (ShapeError, "`cu_seqlens_q` must have 1 axes", {"cu_seqlens_q": torch.tensor([[0, 272]])}),
    "no axis": (DTypeError, "`cu_seqlens_q` must be a sequence or tensor", {"cu_seqlens_q": torch.tensor(272)}),
    "fractions": (DTypeError, "`cu_seqlens_q` must hold integers", {"cu_seqlens_q": torch.tensor([0.0, 272.0])}),
    "a list of fractions": (DTypeError, "`cu_seqlens_q` must hold integers", {"cu_seqlens_q": [0, 271.5, 272]}),
    "none": (DTypeError, "`cu_seqlens_q` must be a sequence", {"cu_seqlens_q": None}),
    "meta": (UnsupportedError, "cannot be read here", {"cu_seqlens_q": torch.tensor(CU, device="meta")}),
    "other counts": (ShapeError, "must hold as many numbers", {"cu_seqlens_k": [0, 272]}),
    "fewer keys": (ShapeError, "as many rows as `query`", {"key": K[:9], "value": VALUE[:9]}),
    "four axes": (ShapeError, "`query` must have 3 axes, (total, heads, width)", {"query": Q[None]}),
    "no tensor": (DTypeError, "`key` must be a torch.Tensor", {"key": 3}),
    "other heads": (ShapeError, "the axes are (total, heads, width)", {"key": K[:, :1].expand(-1, 3, -1)}),
    "weights": (UnsupportedError, "must not ask for weights", {"return_aux": qkv.AuxRequest(weights=True)}),
    "top_k": (UnsupportedError, "must not ask for weights", {"return_aux": qkv.AuxRequest(top_k=1)}),
    "a bias of positions": (ShapeError, "must have 1 on that axis", {"bias": torch.zeros(1, 1, 1, max(LENGTHS))}),
    "a bias of the whole": (ShapeError, "`bias` must broadcast", {"bias": torch.zeros(1, 1, 272, 272)}),
    "a bias of three axes": (ShapeError, "(L, S) or 4-D", {"bias": torch.zeros(H, 2, 2)}),
    "ids of the whole": (ShapeError, "(document 0, B = 6 documents)", {"pattern": qkv.documents(list(range(272)))}),
    "too long": (ValueOutOfRange, "(document 1, B = 6", {"pattern": qkv.key_lengths([5, 1, 3, 1, 2, 9])}),
    "other rows": (ShapeError, "for each of the B=6 batch rows", {"pattern": qkv.key_lengths([5, 1])}),
    "a mask": (MaskError, "must broadcast to [B=6, H=4, L=0, S=0]", {"pattern": qkv.mask(torch.ones(5, 5) > 0)}),
    "sdpa": (UnsupportedError, "it has no softcap", {"softcap": 1.0, "backend": "sdpa"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_any_work(name: str) -> None:
    error, said, changed = REFUSED[name]
    arguments = {"query": Q, "key": K, "value": VALUE, "cu_seqlens_q": CU, "cu_seqlens_k": None} | changed
    with pytest.raises(error) as caught:
        varlen_attention(**arguments)
    text = str(caught.value)
    assert said in text and text.count("; ") == 2, text


# Graphs


def test_a_compiled_graph_breaks_at_the_call() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, edges: Tensor) -> Tensor:
        return varlen_attention(q * 2, k, v, edges, pattern=qkv.causal()).sin()

    given = (*inputs(), torch.tensor(CU))
    assert torch.equal(torch.compile(function, backend="eager")(*given), function(*given))
    with pytest.raises(Unsupported, match="a compiled or exported graph must not depend on values; got cu_seqlens"):
        torch.compile(lambda *x: function(*x) + 1, backend="eager", fullgraph=True)(*given)


class Layer(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attention(q, k, v, CU)


@pytest.mark.parametrize("strict", [False, True])
def test_no_export(strict: bool) -> None:
    with pytest.raises(Exception, match="a compiled or exported graph must not depend on values; got cu_seqlens"):
        torch.export.export(Layer(), tuple(inputs()), strict=strict)


def test_tensors_without_numbers() -> None:
    assert varlen_attention(*(x.to("meta") for x in inputs()), CU).shape == (CU[-1], H, V)
    with FakeTensorMode():
        fake = [torch.empty(*x.shape) for x in inputs()]
        assert varlen_attention(*fake, CU, pattern=qkv.causal()).shape == (CU[-1], H, V)
        with pytest.raises(UnsupportedError, match="numbers cannot be read here"):
            varlen_attention(*fake, torch.tensor(CU) + 0)
