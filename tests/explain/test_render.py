"""The printed explanation: golden files, widths, budgets, colours.

`OVERWRITE_GOLDEN=1 pytest tests/explain` writes the golden files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from qkv.explain import MISTAKES, explain, worked_example
from qkv.explain.figures import columns
from qkv.patterns import causal, window

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
OVERWRITE = os.environ.get("OVERWRITE_GOLDEN") == "1"


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def small(**options):
    numbers = torch.randint(-1, 3, (3, 2, 4, 4), generator=torch.Generator().manual_seed(7))
    return explain(*numbers[:, None], tokens=["注意", "ü", "\x1b[2J", "extraordinarily"], **options)


def large(L=40, S=50, D=24, **options):
    return explain(
        draw(2, 4, L, D, seed=1), draw(2, 2, S, D, seed=2), draw(2, 2, S, D, seed=3), head=3, batch=1, **options
    )


def without_errors(text):
    """The last bits of differences depend on the machine: they are not part of what is compared."""
    return re.sub(r"\(max \|(Δ|diff)\| [^)]*\)", r"(max |\1| *)", text)


TEXTS = {
    "article": lambda: worked_example("article").text(),
    "article_plain": lambda: worked_example("article").text(plain=True, width=60),
    "cat": lambda: worked_example("cat").text(mistake="no-scale"),
    "cross": lambda: worked_example("cross").text(mistake="wrong-axis"),
    "dropout": lambda: small(pattern=causal(), dropout_p=0.25, seed=7, head=1, scale=0.25).text(
        mistake="mask-after-softmax"
    ),
    "softcap_bias": lambda: small(softcap=2.0, bias=torch.eye(4) / 2, row=0).text(steps=["softcap", "bias", "softmax"]),
    "large": lambda: large(pattern=causal() & window(9), dropout_p=0.1).text(mistake="inverted-mask"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_is_the_golden_one(name):
    text = without_errors(TEXTS[name]()) + "\n"
    file = GOLDEN / f"explain_{name}.txt"
    if OVERWRITE:
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("plain", [False, True])
def test_no_line_is_wider_than_said(width, plain):
    for e in (worked_example("article"), worked_example("cross"), small(softcap=1.0), large(), large(L=1, D=3)):
        for name in MISTAKES:
            for line in e.text(width=width, plain=plain, mistake=name).splitlines():
                assert columns(line) <= width, line
                assert line == line.rstrip()


def test_plain_text_is_ascii_but_for_the_tokens():
    assert worked_example("cat").text(plain=True, mistake="no-scale").isascii()
    assert large(pattern=causal()).text(plain=True).isascii()


def test_a_cell_keeps_its_place_through_the_steps():
    lines = worked_example("cat").text().splitlines()
    at = {line.index("sat", 50) for line in lines if re.search(r"  sat( +[-−\d·.∞]+){3}$", line)}
    assert len(at) == 1
    rows = [line for line in lines if re.search(r"  sat( +[-−\d·.∞]+){3}$", line)]
    assert len(rows) == 6
    assert len({len(line) for line in rows}) == 1


def test_numbers_never_touch():
    keys = torch.tensor([[1000], [0], [0], [0], [0], [0], [0], [0]])
    for width in range(40, 70):
        text = explain(torch.tensor([[1]]), keys, keys, scale=1.0).text(width=width)
        assert not re.search(r"\d−\d", text)


def test_budget_of_eight_by_eight():
    whole = explain(draw(8, 2), draw(8, 2), draw(8, 2)).text()
    assert "too large" not in whole
    text = explain(draw(9, 2), draw(9, 2), draw(9, 2), row=4).text()
    assert "too large to print in full: row q4, the 8 of 9 keys that weigh most there" in text
    assert "S (9, 9)  x ∈ [" in text
    shown = re.search(r"^ +S +((k\d +)+k\d)$", text, re.MULTILINE)[1].split()
    assert len(shown) == 8
    weights = explain(draw(9, 2), draw(9, 2), draw(9, 2)).steps["softmax"].value[0, 0, 4]
    assert {f"k{j}" for j in range(9)} - set(shown) == {f"k{int(weights.argmin())}"}


def test_infinity_negative_zero_and_hidden_cells_are_printed_as_such():
    e = explain(torch.tensor([[-0.0], [1.0]]), torch.tensor([[1.0], [1.0]]), torch.ones(2, 1), pattern=causal())
    text = e.text()
    assert re.search(r"Q  q0  −0", text)
    assert re.search(r"q0 +−?0 +−∞", text)
    assert re.search(r"q0 +1(\.000)? +·$", text, re.MULTILINE)


def test_colours_follow_the_roles_and_change_nothing_else():
    e = worked_example("cat")
    painted = e.text(colour=True)
    assert "\x1b[38;5;33mQ  \x1b[0m" in painted
    assert "\x1b[38;5;208mK  \x1b[0m" in painted
    assert "\x1b[38;5;35mV  \x1b[0m" in painted
    assert re.search(r"\x1b\[38;5;135m +1 +1 +2\x1b\[0m", painted)
    bare = re.sub(r"\x1b\[[\d;]*m", "", painted)
    assert [line.rstrip() for line in bare.splitlines()] == e.text().splitlines()
    assert "\x1b" not in e.text()


def test_hostile_tokens_reach_no_terminal():
    assert "\x1b" not in small().text()
    assert "<1b>[2J" in small().text()


def test_chosen_steps_keep_their_numbers_and_order():
    text = worked_example("cat").text(steps=["output", "scale", "scale"])
    assert re.findall(r"^ (\d) (\w+)", text, re.MULTILINE) == [("2", "scale"), ("6", "output")]
