"""The pages do what they say: every Python block runs, every printed output and every link is checked.

In a block `# -> x` ends a statement whose value has the repr x, or which prints x. A ```text block that directly
follows a Python block is what that block prints, the value of its last statement included. An error of ours ends the
block and is printed as the last line of a traceback, a warning as its class and text. `...` stands for anything. The
blocks of a page share their names.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import io
import re
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import qkv
from qkv.dropout import draw_seed, dropout_keep, keep_scale, threshold
from qkv.errors import QkvError
from qkv.patterns.leaves.blocks import RandomBlocks

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path(qkv.__file__).parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
MODULES = sorted(path for path in SOURCE.rglob("*.py") if ">>>" in path.read_text(encoding="utf-8"))

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAYS = re.compile(r".*# -> (.+)$")
LINK = re.compile(r"\]\(([^)\s]+)\)")
# What the README leaves to its reader, and a shorter length than the one it shows.
GIVEN = {"README.md": {"slopes": torch.full((8,), 0.1), "sinks": torch.zeros(8)}}
SHORTER = {"README.md": ("4096", "256")}


class Snippet(NamedTuple):
    """A Python block, the line of its page on which its code begins, and the text block directly after it, if any."""

    code: str
    line: int
    output: str | None


class Outcome(NamedTuple):
    """What a statement printed, the repr of its value if it has one, whether it warned or failed, whether it failed."""

    printed: str
    value: str
    loud: bool
    failed: bool


def snippets(page: str) -> list[Snippet]:
    """The Python blocks of a page; a text block that follows none is an error, since nothing would check it."""
    found: list[Snippet] = []
    end = -1
    for block in BLOCK.finditer(page):
        line = page.count("\n", 0, block.start()) + 2
        if block[1] == "text":
            assert end >= 0 and not page[end : block.start()].strip(), f"line {line}: no Python block prints this"
            found[-1] = found[-1]._replace(output=block[2])
        if block[1] == "python":
            found.append(Snippet(block[2], line, None))
        end = block.end() if block[1] == "python" else -1
    return found


def run(page: str, names: dict[str, Any], where: str = "page") -> list[str]:
    """Run the blocks of a page among `names`; every place where what came out is not what is written."""
    return [fault for snippet in snippets(page) for fault in _run(snippet, names, where)]


def _run(snippet: Snippet, names: dict[str, Any], where: str) -> list[str]:
    tree = ast.increment_lineno(ast.parse(snippet.code), snippet.line - 1)
    said = {
        snippet.line + number: found[1]
        for number, text in enumerate(snippet.code.splitlines())
        if (found := SAYS.match(text))
    }
    printed, faults, loud, failed = "", [], False, False
    for statement in tree.body:
        outcome = _execute(statement, names, where)
        loud, failed = loud or outcome.loud, outcome.failed
        if statement.end_lineno in said:
            want = said.pop(statement.end_lineno)
            faults += _compare(f"{where}:{statement.end_lineno}", want, outcome.printed + outcome.value)
        else:
            printed += outcome.printed + (outcome.value if statement is tree.body[-1] else "")
        if failed:
            break
    faults += [f"{where}:{line}: nothing has the value {value}" for line, value in said.items()]
    if snippet.output is not None:
        faults += _compare(f"{where}:{snippet.line}", snippet.output, printed)
    elif loud:
        faults.append(f"{where}:{snippet.line}: {printed}")
    return faults


def _execute(statement: ast.stmt, names: dict[str, Any], where: str) -> Outcome:
    out, value, failed = io.StringIO(), None, False
    with redirect_stdout(out), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if isinstance(statement, ast.Expr):
                value = eval(compile(ast.Expression(statement.value), where, "eval"), names)
            else:
                exec(compile(ast.Module([statement], []), where, "exec"), names)
        except QkvError as error:
            failed = True
            print(f"{_full_name(type(error))}: {error}")
    told = "".join(f"{_full_name(warning.category)}: {warning.message}\n" for warning in caught)
    return Outcome(told + out.getvalue(), "" if value is None else f"{value!r}\n", bool(caught) or failed, failed)


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _compare(place: str, want: str, got: str) -> list[str]:
    """Blanks at line ends aside, `...` for anything, and an error's text in lines as one likes."""
    want, got = ("\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n" for text in (want, got))
    flags = doctest.ELLIPSIS | (doctest.NORMALIZE_WHITESPACE if "qkv.errors." in got else 0)
    same = doctest.OutputChecker().check_output(want, got, flags)
    return [] if same else [f"{place}: written\n{want}came out\n{got}"]


def namespace(path: Path) -> tuple[dict[str, Any], list[str]]:
    """A page's names after its blocks have run, and its faults."""
    names = dict(GIVEN.get(path.name, {}))
    text = path.read_text(encoding="utf-8")
    if path.name in SHORTER:
        text = text.replace(*SHORTER[path.name])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return names, run(text, names, path.name)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_page_does_what_it_says(path):
    faults = namespace(path)[1]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "page, fault",
    [
        ("```python\n1 + 1  # -> 2\n```\n", None),
        ("```python\n1 + 1  # -> 3\n```\n", "page:2: written"),
        ("```python\nprint('a')\n2\n```\n\n```text\na\n2\n```\n", None),
        ("```python\nprint('a')\n```\n```text\nb\n```\n", "page:2: written"),
        ("```python\nfor x in [1]:\n    x  # -> 1\n    x\n```\n", "page:3: nothing has the value"),
        ("```python\nimport qkv\nqkv.window(-1)\n```\n```text\nqkv.errors.ValueOutOfRange: ...\n```\n", None),
        ("```python\nimport qkv\nqkv.window(-1)\n```\n", "qkv.errors.ValueOutOfRange"),
        ("```python\nimport warnings\nwarnings.warn('x')\n```\n```text\nbuiltins.UserWarning: x\n```\n", None),
    ],
)
def test_a_wrong_page_is_noticed(page, fault):
    faults = run(page, {})
    assert faults == [] if fault is None else fault in "".join(faults)


def test_a_text_block_that_nothing_prints_is_noticed():
    with pytest.raises(AssertionError, match="line 4: no Python block prints this"):
        snippets("words\n\n```text\na\n```\n")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_examples_of_docstrings(path):
    name = ".".join(("qkv", *path.relative_to(SOURCE).with_suffix("").parts))
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert failed == 0
    assert tried > 0


@pytest.mark.parametrize("path", LINKED, ids=lambda path: path.stem)
def test_relative_links_lead_somewhere(path):
    for target in LINK.findall(path.read_text(encoding="utf-8")):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        page = (path.parent / file).resolve() if file else path
        assert page.exists(), f"{path.name}: {target}"
        if anchor:
            assert anchor in anchors(page.read_text(encoding="utf-8")), f"{path.name}: {target}"


def anchors(page: str) -> set[str]:
    """The names under which headings can be linked to: lower case, no punctuation, hyphens for spaces."""
    titles = re.findall(r"^#+ (.+)$", BLOCK.sub("", page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_readme_is_short_and_starts_with_code():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    assert lines.index("```python") < 20


def test_every_page_is_reached_from_the_readme_and_the_index():
    pages = {path.name for path in PAGES} - {"README.md"}
    readme, index = (set(LINK.findall(path.read_text(encoding="utf-8"))) for path in (README, ROOT / "docs/index.md"))
    assert {f"docs/{name}" for name in pages} <= readme
    assert pages - {"index.md"} <= index


def test_pages_name_every_constructor_and_every_error():
    patterns, errors = ((ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("patterns", "errors"))
    constructors = {name for name in vars(qkv.patterns) if callable(vars(qkv.patterns)[name])} - {"Pattern", "parse"}
    kinds = {name for name, kind in vars(qkv.errors).items() if isinstance(kind, type)} - {"Iterable"}
    assert [name for name in sorted(constructors) if f"### `{name}(" not in patterns] == []
    assert [name for name in sorted(kinds) if f"`{name}`" not in errors] == []


def test_dropout_page_s_reference_is_the_rule():
    names = namespace(ROOT / "docs/dropout.md")[0]
    draw = np.random.default_rng(0)
    for _ in range(30):
        seed, p = int(draw.integers(0, 1 << 64, dtype=np.uint64)), float(draw.random())
        b, h = (int(draw.integers(0, 1 << 33)) for _ in range(2))
        i, j = (int(draw.integers(-(1 << 20), 1 << 40)) for _ in range(2))
        edge = names["number"](seed, b, h, i, j) / 65536  # a threshold that the number just reaches
        for share in (p, edge, edge + 2**-16):
            ours = dropout_keep(seed, share, *(torch.tensor([x]) for x in (b, h, i, j)))
            assert names["kept"](seed, share, b, h, i, j) == bool(ours)
    generator = torch.Generator().manual_seed(5)
    assert names["draw_seed"](torch.Generator().manual_seed(5)) == draw_seed(generator)
    assert names["threshold"](0.3) == threshold(0.3) == 19661
    assert names["kept_scale"](0.3) == keep_scale(0.3)


@pytest.mark.parametrize("ahead", [False, True])
def test_patterns_page_s_draw_is_the_rule(ahead):
    names = namespace(ROOT / "docs/patterns.md")[0]
    rows = np.array([0, 1, 2, 3, 9, 40, 4095])
    for count, seed in ((1, 0), (3, 7), (8, (1 << 63) + 5)):
        leaf = RandomBlocks(count, 16, seed, ahead)
        for row, drawn in zip(rows.tolist(), leaf.draw(rows, 50), strict=True):
            candidates = 50 if ahead else row + 1
            assert names["draw"](row, candidates, count, seed) == [n for n in drawn.tolist() if n >= 0]


REPEAT = """
import hashlib, torch, qkv
torch.manual_seed(0)
digest = hashlib.sha256()
for backend in ("reference", "blockwise", "cpu"):
    for pattern in (None, qkv.causal() & qkv.window(40), qkv.strided(12)):
        q, k, v = (torch.randn(2, 3, 150, 16, requires_grad=True) for _ in range(3))
        out = qkv.attention(q, k, v, pattern=pattern, dropout_p=0.1, backend=backend)
        for tensor in (out, *torch.autograd.grad(out.square().sum(), (q, k, v))):
            digest.update(tensor.detach().contiguous().numpy().tobytes())
print(digest.hexdigest())
"""


def test_numerics_page_s_promise_across_processes():
    done = [subprocess.run([sys.executable, "-c", REPEAT], capture_output=True, text=True, check=True) for _ in "12"]
    assert done[0].stdout == done[1].stdout
    assert len(done[0].stdout.strip()) == 64
