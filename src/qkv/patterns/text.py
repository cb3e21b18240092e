"""Reading a pattern's text: the Python expression that `str` prints, with constructors and literals only,
never evaluated; and its form, the same text with {name} for each tensor, which operators of a graph carry.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from torch import Tensor

from qkv.errors import PatternSyntaxError, QkvError, message, unknown_name
from qkv.patterns.leaves.keys import digest

if TYPE_CHECKING:
    from qkv.patterns.pattern import Pattern

LONGEST = 10_000  # characters; a text is a line that a person wrote
CONSTRUCTORS: dict[str, Callable[..., Pattern]] = {}  # by name, entered by `constructor`
CONTENT = (
    "documents",
    "key_padding",
    "mask",
    "blocks",
    "where",
)  # given as tensors or functions, which a text cannot hold
LITERAL = ("lengths", "tokens")  # tensors that print as the list of their numbers
_PLACE = re.compile(r"\{(\w+)\}")


def parse(text: str) -> Pattern:
    """The pattern that a text says, for example `parse("causal() & window(127)")`.

    Precedence is Python's: `~`, then `-`, then `&`, then `|`. Raises PatternSyntaxError,
    or the constructor's own error.
    """
    if not isinstance(text, str) or len(text) > LONGEST:
        seen = f"{len(text)} characters" if isinstance(text, str) else type(text).__name__
        _refuse(f"a text of at most {LONGEST:,} characters", f"got {seen}", "write a pattern as str(pattern) prints it")
    if "(<" in text:
        _refuse("made of literals", "its <...> stands for a tensor or a function", "build it in Python")
    return _read(text, None)


def read_form(form: str, tensors: Sequence[Tensor]) -> Pattern:
    """The pattern of a form and its tensors, in the order of their places."""
    return _read(form, iter(tensors))


def filled(form: str, tensors: Sequence[Tensor]) -> str:
    """The text of a form: each tensor in its place as its sizes and a name for its content, or as its numbers."""
    given = iter(tensors)

    def shown(place: re.Match[str]) -> str:
        name, tensor = place[1], next(given)
        if name in LITERAL:
            return str(tensor.tolist())
        return f"<{name} {'x'.join(map(str, tensor.shape))} {digest(tensor.detach().cpu().numpy())[:8]}>"

    return _PLACE.sub(shown, form)


def _read(text: str, tensors: Iterator[Tensor] | None) -> Pattern:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        _refuse("a Python expression", f"got {text!r} ({error})", "write for example causal() & window(127)")
    except (RecursionError, MemoryError):
        _refuse_depth()
    try:
        return _pattern(tree, tensors)
    except RecursionError:
        _refuse_depth()


def _refuse_depth() -> NoReturn:
    _refuse("an expression of moderate depth", "it is nested too deeply", "build it in Python instead")


def _refuse(holds: str, seen: str, remedy: str) -> NoReturn:
    raise PatternSyntaxError(message(f"a pattern's text must be {holds}", seen, remedy)) from None


def _pattern(node: ast.expr, tensors: Iterator[Tensor] | None) -> Pattern:
    if isinstance(node, ast.Call):
        return _call(node, tensors)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return ~_pattern(node.operand, tensors)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        return _pattern(node.left, tensors) & _pattern(node.right, tensors)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _pattern(node.left, tensors) | _pattern(node.right, tensors)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        return _pattern(node.left, tensors) - _pattern(node.right, tensors)
    _refuse("pattern calls joined by & | - ~", f"got {_shown(node)!r}", "name a constructor with parentheses: causal()")


def _call(node: ast.Call, tensors: Iterator[Tensor] | None) -> Pattern:
    name = node.func.id if isinstance(node.func, ast.Name) else _shown(node.func)
    if name in CONTENT and (tensors is None or name == "where"):
        _refuse("made of literals", f"{name}(...) holds a tensor or a function", f"build {name}(...) in Python")
    if name not in CONSTRUCTORS:
        raise unknown_name("pattern", name, CONSTRUCTORS.keys() - set(CONTENT))
    arguments = [_value(argument, tensors) for argument in node.args]
    keywords = {keyword.arg: _value(keyword.value, tensors) for keyword in node.keywords if keyword.arg is not None}
    if len(keywords) != len(node.keywords):
        _refuse("made of plain arguments", f"got ** in {_shown(node)!r}", "name each argument")
    try:
        return CONSTRUCTORS[name](*arguments, **keywords)
    except QkvError:
        raise
    except (TypeError, ValueError) as error:
        seen = f"got {_shown(node)!r} ({error})"
        _refuse("calls with the constructors' arguments", seen, f"see help(qkv.{name})")


def _shown(node: ast.AST) -> str:
    try:
        return ast.unparse(node)
    except ValueError:  # Python prints no integer of thousands of digits
        return "a number of too many digits"


def _value(node: ast.expr, tensors: Iterator[Tensor] | None) -> object:
    if tensors is not None and isinstance(node, ast.Set):
        return next(tensors)
    if (
        isinstance(node, ast.List)
        and node.elts
        and all(isinstance(item, ast.Call | ast.BinOp | ast.UnaryOp) for item in node.elts)
    ):
        return [_pattern(item, tensors) for item in node.elts]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        _refuse("made of literals", f"got {_shown(node)!r}", "write numbers, strings, tuples and lists")
