"""torch.export over the calls: programs for any sizes, saved, loaded, and run in another process."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import qkv
from qkv.errors import UnsupportedError

B, H, G, L, D, V = 2, 4, 2, 70, 8, 6
WINDOW = qkv.causal() & qkv.window(30)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kept(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(9)) > 0.3


def inputs(length: int = L, batch: int = B) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (batch, H, length, D), (batch, G, length, D), (batch, G, length, V)
    return tuple(normal(*shape, seed=n) for n, shape in enumerate(shapes))


PADDED = qkv.key_padding(kept(B, L)) & qkv.causal() - qkv.documents([0] * 30 + [1] * 40)


class Layer(nn.Module):
    def __init__(self, pattern: qkv.Pattern | None = None, **options: Any) -> None:
        super().__init__()
        self.pattern, self.options = pattern, options
        self.slopes = nn.Parameter(normal(H, seed=8))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None) -> Tensor:
        pattern = self.pattern if keep is None else self.pattern & qkv.key_padding(keep)
        return qkv.attention(q, k, v, pattern=pattern, bias=qkv.alibi(self.slopes), **self.options)


LENGTH, BATCH = Dim("length", min=2, max=4096), Dim("batch", min=2, max=64)
ANY = ({0: BATCH, 2: LENGTH},) * 3
EXPORTS: dict[str, tuple[Layer, tuple[Tensor, ...], Any, tuple[Tensor, ...]]] = {
    "fixed sizes": (Layer(WINDOW), inputs(), None, inputs()),
    "any sizes": (Layer(WINDOW), inputs(), ANY, inputs(33, 3)),
    "any padding": (
        Layer(WINDOW),
        (*inputs(), kept(B, L)),
        (*ANY, {0: BATCH, 1: LENGTH}),
        (*inputs(33, 3), kept(3, 33)),
    ),
    "content": (Layer(qkv.documents([0] * 30 + [1] * 40)), inputs(), ({0: BATCH},) * 3, inputs(L, 3)),
    "dropout": (Layer(WINDOW, dropout_p=0.3, softcap=2.0), inputs(), ANY, inputs(33, 3)),
}


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("name", EXPORTS)
def test_exported_saved_and_loaded(name: str, strict: bool, tmp_path: Path) -> None:
    layer, given, sizes, other = EXPORTS[name]
    program = torch.export.export(layer, given, dynamic_shapes=sizes, strict=strict)
    assert [n.target for n in program.graph.nodes].count(torch.ops.qkv.attention.default) == 1
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    (tmp_path / "program.pt2").write_bytes(buffer.getvalue())
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    for args in (given, other):
        torch.manual_seed(4)
        got = loaded(*args)
        torch.manual_seed(4)
        assert torch.equal(got, layer(*args))
    loaded(*given).sum().backward()
    layer.slopes.grad = None
    layer(*given).sum().backward()
    assert "dropout" in name or torch.equal(dict(loaded.named_parameters())["slopes"].grad, layer.slopes.grad)


def test_an_exported_program_runs_in_another_process(tmp_path: Path) -> None:
    """Where qkv is imported, which registers its operators."""
    torch.export.save(torch.export.export(Layer(PADDED), inputs()), tmp_path / "program.pt2")
    torch.save([*inputs(), Layer(PADDED)(*inputs())], tmp_path / "tensors.pt")
    code = (
        "import qkv, torch; *given, want = torch.load('tensors.pt');"
        "print(torch.equal(torch.export.load('program.pt2').module()(*given), want))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == "True"


def test_export_refuses_a_function() -> None:
    with pytest.raises(UnsupportedError, match=r"must be given by rules and tensors; got where\(fn\)"):
        torch.export.export(Layer(qkv.where(lambda b, h, i, j: j <= i)), inputs(), strict=False)
