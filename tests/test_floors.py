"""Holds the floors of the source tree by walking its imports. `python tests/test_floors.py` prints the sizes instead.

The sizes are for the reader; the floors, the absence of cycles and of hidden imports are what the test holds.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "qkv"

# The floor of each top module or folder. A module imports from lower floors or from its own; a new one gets a row here.
FLOORS = {
    **dict.fromkeys(
        (
            *("version", "errors", "types", "shapes", "settings", "philox", "tensorfile", "gguf_file", "gguf_header"),
            *("values", "outside"),
        ),
        0,
    ),
    **dict.fromkeys(("patterns", "scores", "dropout"), 1),
    **dict.fromkeys(("problem", "inputs", "question"), 2),
    "backends": 3,
    **dict.fromkeys(
        (
            *("attention", "cache", "dispatch", "in_graph", "merging", "operators", "packed_run", "packing"),
            *("linear", "planning", "remembered", "varlen", "weights"),
        ),
        4,
    ),
    "nn": 5,
    "models": 6,
    **dict.fromkeys(("compare", "explain", "demo", "info"), 7),
    **dict.fromkeys(("cli", "__main__"), 8),
}
# Files of these names in one folder, with those named after them (blockwise_backward), never import one another.
APART = {
    "backends": {"reference", "blockwise", "sdpa", "cpu", "flex", "triton"},
    "cli": {"compare", "demo", "explain", "generate", "info", "show"},
}
# Siblings on floor 7, as (importer, imported): only `demo` may show the others.
SIBLINGS = {
    *(("explain", "info"), ("explain", "demo"), ("explain", "compare"), ("info", "demo"), ("info", "explain")),
    *(("info", "compare"), ("compare", "explain"), ("compare", "info"), ("compare", "demo")),
}
# The compiled module, which may be absent, and the only module that asks for it.
COMPILED, ASKS = "qkv._native", "qkv.backends.extension"
OPTIONAL = {"safetensors", "tokenizers", "gguf", "matplotlib", "transformers"}


def load(root: Path) -> dict[str, ast.Module]:
    """The parsed modules below `root` by dotted name, packages as `package.__init__`."""
    files = sorted(root.rglob("*.py"))
    names = [".".join(("qkv", *file.relative_to(root).with_suffix("").parts)) for file in files]
    return {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in zip(names, files, strict=True)}


def targets(node: ast.stmt, name: str, tree: dict[str, ast.Module]) -> Iterator[str]:
    """The modules that one import statement of module `name` names, as written in `tree` where they are ours."""
    if isinstance(node, ast.Import):
        written = [alias.name for alias in node.names]
    else:
        above = name.split(".")[: -node.level] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        deeper = [f"{base}.{alias.name}" for alias in node.names]
        written = [one if one in tree or f"{one}.__init__" in tree else base for one in deeper]
    for one in dict.fromkeys(written):
        yield f"{one}.__init__" if f"{one}.__init__" in tree else one


def imports(tree: dict[str, ast.Module], name: str) -> Iterator[tuple[str, str]]:
    """(imported module, where the import stands) for each one: "top", "types" (TYPE_CHECKING) or "hidden"."""
    top = {id(node): "top" for node in tree[name].body}
    for node in tree[name].body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            top |= {id(inner): "types" for inner in node.body}
    for node in ast.walk(tree[name]):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for target in targets(node, name, tree):
                yield target, top.get(id(node), "hidden")


def own(tree: dict[str, ast.Module], name: str, *places: str) -> list[str]:
    """Our modules that one module imports, at the given places or anywhere."""
    found = [target for target, place in imports(tree, name) if not places or place in places]
    return [target for target in found if target.split(".")[0] == "qkv"]


def unplaced(tree: dict[str, ast.Module]) -> list[str]:
    return [name for name in tree if name != "qkv.__init__" and name.split(".")[1] not in FLOORS]


def upward(tree: dict[str, ast.Module]) -> list[str]:
    def floor(name: str) -> int:
        return FLOORS.get(name.split(".")[1], 0)

    inside = [name for name in tree if name != "qkv.__init__"]
    return [f"{a} -> {b}" for a in inside for b in own(tree, a) if b in tree and floor(a) < floor(b)]


def of_the_root(tree: dict[str, ast.Module]) -> list[str]:
    return [name for name in tree if {"qkv", "qkv.__init__"} & set(own(tree, name))]


def sideways(tree: dict[str, ast.Module]) -> list[str]:
    def family(name: str) -> str | None:
        folder, *rest = name.split(".")[1:]
        first = rest[0].split("_")[0] if rest else ""
        return first if first in APART.get(folder, ()) else None

    def apart(a: str, b: str) -> bool:
        folder, other = a.split(".")[1], b.split(".")[1]
        return (folder, other) in SIBLINGS or (folder == other and family(b) not in {None, family(a)})

    inside = [name for name in tree if name != "qkv.__init__"]
    return [f"{a} -> {b}" for a in inside for b in own(tree, a) if b.count(".") and apart(a, b)]


def cyclic(tree: dict[str, ast.Module]) -> list[str]:
    """Modules that lead back to themselves when the program runs."""
    edges = {name: set(own(tree, name, "top", "hidden")) & tree.keys() for name in tree}

    def reached(start: str) -> set[str]:
        seen, open_ends = set(), [start]
        while open_ends:
            fresh = edges[open_ends.pop()] - seen
            seen |= fresh
            open_ends.extend(fresh)
        return seen

    return [name for name in tree if name in reached(name)]


def hidden(tree: dict[str, ast.Module]) -> list[str]:
    found = [(a, b) for a in tree for b, place in imports(tree, a) if place == "hidden"]
    return [f"{a} -> {b}" for a, b in found if b.split(".")[0] not in OPTIONAL and b != COMPILED]


def of_the_compiled(tree: dict[str, ast.Module]) -> list[str]:
    return [name for name in tree if COMPILED in own(tree, name) and name != ASKS]


def eager_optional(tree: dict[str, ast.Module]) -> list[str]:
    found = [(a, b) for a in tree for b, place in imports(tree, a) if place == "top"]
    return [f"{a} -> {b}" for a, b in found if b.split(".")[0] in OPTIONAL]


def more_than_reexports(tree: dict[str, ast.Module]) -> list[str]:
    def allowed(node: ast.stmt) -> bool:
        if isinstance(node, ast.Assign):
            return isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        return is_text or isinstance(node, ast.ImportFrom)

    return [name for name, module in tree.items() if name.endswith("__init__") and not all(map(allowed, module.body))]


RULES = (unplaced, upward, of_the_root, sideways, cyclic, hidden, of_the_compiled, eager_optional, more_than_reexports)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_source_keeps(rule):
    assert rule(load(SOURCE)) == []


PLANTED = {  # for each rule, files that break it when added to the sound tree, and what it must say
    unplaced: ({"somewhere": ""}, ["qkv.somewhere"]),
    upward: (
        {
            "errors": "from qkv.attention import attention",
            "scores": "if TYPE_CHECKING:\n    from qkv.problem import P",
            "problem": "",
        },
        ["qkv.errors -> qkv.attention", "qkv.scores -> qkv.problem"],
    ),
    of_the_root: ({"problem": "import qkv", "types": "from . import attention_"}, ["qkv.problem", "qkv.types"]),
    sideways: (
        {
            "backends.cpu_tiles": "from qkv.backends.sdpa import run",
            "backends.walk": "from qkv.backends.sdpa import run",
            "explain.more": "from qkv.demo.run import f",
        },
        [
            "qkv.backends.cpu_tiles -> qkv.backends.sdpa",
            "qkv.backends.walk -> qkv.backends.sdpa",
            "qkv.explain.more -> qkv.demo.run",
        ],
    ),
    cyclic: (
        {"shapes": "from qkv.types import A", "types": "from . import shapes", "settings": "from qkv.types import A"},
        ["qkv.shapes", "qkv.types"],
    ),
    hidden: ({"problem": "def f():\n    import numpy"}, ["qkv.problem -> numpy"]),
    of_the_compiled: (
        {"backends.cpu": "import qkv._native as native", "attention": "from qkv._native import Call"},
        ["qkv.attention", "qkv.backends.cpu"],
    ),
    eager_optional: ({"demo.run": "import matplotlib.pyplot as plt"}, ["qkv.demo.run -> matplotlib.pyplot"]),
    more_than_reexports: (
        {"models.__init__": "from qkv.models.bert import Bert as Bert\nBert.x = 1", "nn.__init__": "import torch"},
        ["qkv.models.__init__", "qkv.nn.__init__"],
    ),
}
SOUND = {
    "__init__": '"""Names."""\nfrom qkv.attention import attention as attention\n__all__ = ["attention"]',
    "errors": "if TYPE_CHECKING:\n    from qkv.types import A",
    "types": "from qkv.errors import E",
    "backends.base": "from qkv.errors import E",
    "backends.sdpa": "from qkv.backends.base import B\nfrom .base import C",
    "backends.sdpa_more": "from qkv.backends.sdpa import run",
    "attention": "import torch\nfrom qkv.backends.sdpa import run",
    "demo.run": "from qkv.explain.steps import steps\ndef f():\n    import matplotlib.pyplot",
    "explain.steps": "from qkv.attention import attention",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_finds_a_planted_fault(rule):
    def plant(files: dict[str, str]) -> dict[str, ast.Module]:
        return {f"qkv.{name}": ast.parse(text) for name, text in files.items()}

    files, expected = PLANTED[rule]
    assert rule(plant(SOUND)) == []
    assert sorted(rule(plant(SOUND | files))) == expected


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the body, without signature and docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def sizes(root: Path) -> str:
    """A table of file and function lengths below `root`, to be held against the house style by eye."""
    files = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in sorted(root.rglob("*.py"))}
    functions = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions[f"{file.relative_to(root)}:{node.lineno} {node.name}"] = body_lines(node)
    return "\n".join(
        [
            "                  count  median  p90  max",
            _row("lines a file", list(files.values())),
            _row("lines a function", list(functions.values())),
            f"files above 400: {[str(f.relative_to(root)) for f, n in files.items() if n > 400] or 'none'}",
            f"functions above 50: {sum(n > 50 for n in functions.values())} of {len(functions)} (aim: at most 3 %)",
            "longest functions (aim: p90 at most 30):",
            *(f"  {n:4} {name}" for name, n in sorted(functions.items(), key=lambda one: -one[1])[:10]),
        ]
    )


def _row(title: str, values: list[int]) -> str:
    p90 = quantiles(values, n=10, method="inclusive")[-1]
    return f"{title:<17} {len(values):>5}  {median(values):>6.0f}  {p90:>3.0f}  {max(values):>3}"


if __name__ == "__main__":
    print(sizes(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE))
