"""One notation: what `str` prints, `parse` reads back; hostile text is refused, and nothing in it is ever run."""

from __future__ import annotations

import ast
import contextlib
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import qkv
from qkv import parse, patterns
from qkv.errors import DTypeError, PatternSyntaxError, QkvError, UnknownName
from qkv.patterns.pattern import Pattern
from qkv.patterns.text import CONSTRUCTORS, CONTENT
from strategies import literals

NAMES = {name: value for name, value in vars(patterns).items() if callable(value)}


def in_python(text: str) -> Pattern:
    """What the text means as a Python expression."""
    return eval(text, {"__builtins__": {}}, NAMES)


@st.composite
def with_heads(draw) -> Pattern:
    """Literal patterns, some of them lists of heads, and operations around those."""
    below = literals(2)
    pattern = qkv.per_head(draw(st.lists(below, min_size=1, max_size=3))) if draw(st.booleans()) else draw(below)
    other = draw(literals(1))
    return draw(st.sampled_from([pattern, ~pattern, pattern & other, other - pattern, other | pattern]))


@given(literals(3))
def test_what_is_printed_is_read_back(pattern):
    text = str(pattern)
    again = parse(text)
    assert str(again) == text
    assert again.expr.key == pattern.expr.key  # the very same tree, not only an equal one
    assert again.align == pattern.align
    assert in_python(text).expr.key == pattern.expr.key


@given(with_heads())
def test_lists_of_heads_are_read_back(pattern):
    assert parse(str(pattern)).expr.key == pattern.expr.key


@pytest.mark.parametrize("member", ["~causal()", "~~causal()", "causal() - window(3)", "~(causal() | window(3))"])
def test_any_expression_may_stand_in_a_list_of_heads(member):
    text = f"per_head([{member}, full()])"
    assert parse(text).expr.key == in_python(text).expr.key


@pytest.mark.parametrize(
    "pattern, text",
    [
        (qkv.full(), "full()"),
        (qkv.causal(), "causal()"),
        (qkv.causal(align="top_left"), "causal(align='top_left')"),
        (qkv.causal(align="bottom_right"), "causal(align='bottom_right')"),
        (qkv.window(3), "window(3)"),
        (qkv.window(3, right=2), "window(3, 2)"),
        (qkv.window(None, 5), "window(None, 5)"),
        (qkv.window(None, None), "window(None, None)"),
        (qkv.sliding_window(size=4), "sliding_window(4)"),
        (qkv.dilated(3, dilation=2), "dilated(3, dilation=2)"),
        (qkv.dilated(3, 1, dilation=2), "dilated(3, 1, dilation=2)"),
        (qkv.strided(stride=9), "strided(9)"),
        (qkv.sparse_transformer(9), "sparse_transformer(9)"),
        (qkv.fixed(8), "fixed(8)"),
        (qkv.fixed(8, summary=2), "fixed(8, 2)"),
        (qkv.global_tokens(4), "global_tokens(4)"),
        (qkv.global_tokens([7, 0, 7]), "global_tokens([0, 7])"),
        (qkv.global_tokens(torch.tensor([7, 0])), "global_tokens([0, 7])"),
        (qkv.prefix(4), "prefix(4)"),
        (qkv.random_blocks(2, 16, 5), "random_blocks(2, 16, 5)"),
        (qkv.random_blocks(2, 16, 5, ahead=True), "random_blocks(2, 16, 5, ahead=True)"),
        (qkv.block_local(16), "block_local(16)"),
        (qkv.key_lengths(torch.tensor([3, 5])), "key_lengths([3, 5])"),
        (qkv.neighborhood([4, 6], 3), "neighborhood((4, 6), 3)"),
        (qkv.windows2d((4, 6), 2), "windows2d((4, 6), 2)"),
        (qkv.windows2d((4, 6), 2, shift=1), "windows2d((4, 6), 2, shift=1)"),
        (qkv.axial((4, 6), along="height"), "axial((4, 6), 'height')"),
        (qkv.longformer(16, [0, 5]), "longformer(16, [0, 5])"),
        (qkv.bigbird(3, 2, 3, 0), "bigbird(3, 2, 3, 0)"),
        (qkv.bigbird(3, 2, 3, 0, block_size=16), "bigbird(3, 2, 3, 0, block_size=16)"),
        (qkv.per_head([qkv.causal(), qkv.full() & qkv.window(3)]), "per_head([causal(), full() & window(3)])"),
        (qkv.per_head([qkv.causal("top_left")]), "per_head([causal(align='top_left')])"),
    ],
    ids=str,
)
def test_text_of_each_constructor(pattern, text):
    assert str(pattern) == text
    assert repr(pattern) == f"Pattern({text})"
    assert parse(text).expr.key == pattern.expr.key
    assert parse(text).align == pattern.align


def test_every_literal_constructor_can_be_read():
    public = {name for name, value in NAMES.items() if not isinstance(value, type)} - {"parse"}
    assert set(CONSTRUCTORS) | set(CONTENT) == public


A, B, C = (qkv.window(n) for n in (1, 2, 3))


@pytest.mark.parametrize(
    "pattern, text",
    [
        (A & B & C, "window(1) & window(2) & window(3)"),
        (A & (B & C), "window(1) & (window(2) & window(3))"),
        (A | B | C, "window(1) | window(2) | window(3)"),
        (A - B - C, "(window(1) - window(2)) - window(3)"),
        (A - (B - C), "window(1) - (window(2) - window(3))"),
        ((A & B) - C, "(window(1) & window(2)) - window(3)"),
        (A & (B - C), "window(1) & (window(2) - window(3))"),
        ((A & B) | C, "(window(1) & window(2)) | window(3)"),
        (A & (B | C), "window(1) & (window(2) | window(3))"),
        (A | B - C, "window(1) | (window(2) - window(3))"),
        ((A | B) - C, "(window(1) | window(2)) - window(3)"),
        (~A & B, "~window(1) & window(2)"),
        (~(A & B), "~(window(1) & window(2))"),
        (A - ~B, "window(1) - ~window(2)"),
        (~~A, "~~window(1)"),
    ],
    ids=str,
)
def test_parentheses_stand_wherever_a_reader_could_doubt(pattern, text):
    assert str(pattern) == text


@pytest.mark.parametrize(
    "text, grouped",
    [
        ("window(1) & window(2) - window(3)", A & (B - C)),
        ("window(1) - window(2) & window(3)", (A - B) & C),
        ("window(1) | window(2) & window(3)", A | (B & C)),
        ("window(1) | window(2) - window(3)", A | (B - C)),
        ("~window(1) - window(2)", (~A) - B),
        ("~window(1) & ~window(2) | window(3)", ((~A) & (~B)) | C),
        ("window(1) - window(2) - window(3)", (A - B) - C),
    ],
)
def test_precedence_is_pythons(text, grouped):
    assert parse(text).expr.key == grouped.expr.key == in_python(text).expr.key


def test_room_around_and_keywords_are_free():
    assert (
        parse("  causal()  &\\\n window( left = 3 , right=1)\n").expr.key == (qkv.causal() & qkv.window(3, 1)).expr.key
    )
    assert parse("bigbird(window=3, tokens=[1,], random_blocks=1, seed=1_0)") == qkv.bigbird(3, [1], 1, 10)
    assert parse("window(0x10)") == qkv.window(16)


HOSTILE = [
    "", "   ", "()", "causal", "causal(", "causal())", "causal().expr", "causal().__class__()", "causal.__call__()",
    "(lambda: causal())()", "lambda: causal()", "[causal() for x in [1]]", "{causal()}", "[causal()]", "(causal(),)",
    "causal() if full() else full()", "causal() and full()", "not causal()", "-causal()", "+causal()",
    "causal() + full()",
    "causal() ^ full()", "causal() == full()", "causal() << 1", "causal() @ full()", "x := causal()", "(x := causal())",
    "x = causal()", "causal(); causal()", "import os", "await causal()", "(yield)", "causal()[0]", "causal()()",
    "f'{causal()}'", "'causal()'", "b'causal()'", "1", "None", "True", "...", "causal() & 1", "1 | causal()",
    "window(*[1])", "window(**{'left': 1})", "causal(*())", "window(left=1, left=2)", "window(1, left=2)", "window()",
    "window(1, 2, 3)", "window(size=3)", "window(2 ** 9)", "window(1 + 1)", "window(~1)", "window(len('abc'))",
    "window([x for x in range(3)])", "window(causal())", "window({}[0])", "window(a)", "window(left=a.b)",
    "per_head([causal(), 3])", "per_head([1 - 2])", "per_head([causal() for h in range(9)])", "per_head(causal())",
    "per_head(3)", "per_head([*[causal()]])", "global_tokens([causal()])", "causal()\0", "causal()\n\ncausal()",
    "window({[]: 1})", "window({1: 2, **{}})", "window({set()})", "key_lengths([[1], [2, 3]])", "causal(\ud800)",
    "causal()\ud800", "window(0x" + "f" * 5000 + ")", "window(" + "9" * 5000 + ")", "~" * 9000 + "causal()",
    "(" * 4000 + "causal()" + ")" * 4000, "[" * 4000 + "]" * 4000, "window(" + "[" * 150 + "]" * 150 + ")",
    "|".join(["causal()"] * 1000), "causal()" + " " * 10_000,
    "window(" + "-" * 3000 + "1)", "per_head([" * 900 + "causal()" + "])" * 900,
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:32]))
def test_hostile_text_gives_one_clear_error(text):
    with pytest.raises(QkvError) as caught:
        parse(text)
    said = str(caught.value)
    assert said.count("; ") >= 2  # what must hold; what was seen; what to do


@pytest.mark.parametrize(
    "text, seen",
    [
        ("causal().expr", "causal().expr"),
        ("causal() + full()", "causal() + full()"),
        ("window(2 ** 9)", "2 ** 9"),
        ("window(**{'left': 1})", "**"),
        ("window(size=3)", "size"),
        ("causal(", "never closed"),
        ("~" * 5000 + "causal()", "nested too deeply"),
        ("causal()" + "|causal()" * 2000, "characters"),
        ("where(lambda b, h, i, j: i == j)", "where(...)"),
        ("mask([[True]])", "mask(...)"),
        ("documents([0, 0, 1])", "documents(...)"),
    ],
)
def test_syntax_errors_show_what_was_seen(text, seen):
    with pytest.raises(PatternSyntaxError) as caught:
        parse(text)
    assert seen in str(caught.value)


@pytest.mark.parametrize("kind", [None, 3, b"causal()", ["causal()"], qkv.causal()], ids=repr)
def test_only_text_is_read(kind):
    with pytest.raises(PatternSyntaxError):
        parse(kind)


@pytest.mark.parametrize(
    "text, near",
    [
        ("casual()", "causal"),
        ("windw(3)", "window"),
        ("slidingwindow(3)", "sliding_window"),
        ("random_block(1, 2, 3)", "random_blocks"),
        ("Causal()", "causal"),
        ("longfromer(3, 1)", "longformer"),
        ("causal() & blok_local(3)", "block_local"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(text, near):
    with pytest.raises(UnknownName) as caught:
        parse(text)
    assert f"did you mean {near!r}?" in str(caught.value)


@pytest.mark.parametrize("text", ["print(1)", "eval('1')", "__import__('os')", "os.system('true')", "open('x', 'w')"])
def test_other_calls_are_unknown_names(text):
    with pytest.raises(UnknownName):
        parse(text)


@pytest.mark.parametrize(
    "pattern",
    [
        qkv.mask(keep=torch.ones(2, 3, dtype=torch.bool)),
        qkv.documents([0, 0, 1]) & qkv.causal(),
        qkv.key_padding(keep=torch.ones(2, 3, dtype=torch.bool)),
        qkv.blocks(torch.ones(2, 3, dtype=torch.bool), 4),
        qkv.where(lambda b, h, i, j: j <= i),
    ],
    ids=str,
)
def test_content_prints_as_a_placeholder_and_says_that_it_cannot_be_read(pattern):
    assert "<" in str(pattern)
    with pytest.raises(PatternSyntaxError) as caught:
        parse(str(pattern))
    assert "tensor" in str(caught.value) and "Python" in str(caught.value)


def test_a_placeholder_names_the_shape_and_the_content():
    one, other = torch.zeros(2, 3, dtype=torch.bool), torch.ones(2, 3, dtype=torch.bool)
    assert str(qkv.mask(keep=one)).startswith("mask(<keep 2x3 ")
    assert str(qkv.mask(keep=one)) == str(qkv.mask(keep=one.clone())) != str(qkv.mask(keep=other))
    assert str(qkv.mask(keep=one[None], axes="HLS")).endswith(">, axes='HLS')")


def test_nothing_is_evaluated():
    """Neither Python's own evaluation nor any name of the text is reached: an audit hook sees no compiled code."""
    seen, listening = [], True

    def hook(event, arguments):
        if listening and event in {"exec", "import", "open", "os.system"}:
            seen.append((event, arguments))

    sys.addaudithook(hook)
    for text in [
        "__import__('this')",
        "causal(open('x'))",
        "window(eval('1'))",
        "(lambda: print(1))()",
        "causal() & window(2)",
    ]:
        with contextlib.suppress(QkvError):
            parse(text)
    listening = False
    assert seen == []


PIECES = [
    "causal()", "window(", "window(3)", ")", "(", "&", "|", "-", "~", " ", "per_head([", "])", ",", "3", "None", "'",
    "=", "left", "lambda", "x", ".", "[", "]", "{", "}", ":", "**", "*", "0x1f", "-1", "True", "1e5", "\n", "\t", "#",
    "\\", "\0", "ü", "é", "in", "for", "if", "else", "global_tokens", "strided(", "fixed(4", "random_blocks(1, 2", '"',
    "f'", "axial((1, 2), ", "key_lengths(", "[[1], [2, 3]]", "bigbird(1, 2, 3, 4)",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_any_text_is_read_or_refused(text):
    try:
        pattern = parse(text)
    except QkvError:
        return
    assert parse(str(pattern)).expr.key == pattern.expr.key


@pytest.mark.long
@settings(max_examples=20_000)
@given(st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=20).map("".join)))
def test_any_unicode_is_read_or_refused(text):
    try:
        parse(text)
    except QkvError:
        return


def test_a_long_chain_is_read():
    """A hundred operations are no depth that is refused."""
    text = " | ".join(f"window({n})" for n in range(100))
    assert parse(text) == qkv.window(99)
    assert parse(text).count(50) == qkv.causal().count(50)


def test_both_sides_must_be_patterns_and_patterns_have_no_truth_value():
    for wrong in (torch.ones(2, 2, dtype=torch.bool), None, 1, "causal()"):
        for operation in ("__and__", "__or__", "__sub__"):
            with pytest.raises(DTypeError) as caught:
                getattr(qkv.causal(), operation)(wrong)
            assert type(wrong).__name__ in str(caught.value)
    for misuse in ("causal() and window(3)", "not causal()", "window(3) if causal() else full()"):
        with pytest.raises(QkvError) as caught:
            in_python(misuse)
        assert "& | - ~" in str(caught.value)


def test_texts_are_expressions():
    """Whatever is printed without a placeholder is one Python expression."""
    for pattern in (qkv.causal() - (qkv.window(3) | ~qkv.strided(4)), qkv.per_head([~qkv.causal()])):
        assert isinstance(ast.parse(str(pattern), mode="eval"), ast.Expression)
