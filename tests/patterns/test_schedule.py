"""Compilation: the tiles of all parts together are the rule itself, counted exactly, at the cost of the pattern."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import oracles
import qkv
from qkv.patterns import parts, plans, schedule
from qkv.patterns.axis import Order
from qkv.patterns.expr import specialise
from qkv.patterns.leaf import Expr, Extent
from qkv.patterns.leaves.offsets import Offsets
from qkv.patterns.schedule import Compiled, compile_expr
from strategies import FIXED, FUNCTIONS, Case, Sizes, noise, questions, truth, within
from tiles import check_plan

TILE = 64


@contextmanager
def own_choice(**values: object) -> Iterator[None]:
    """Other constants or costs in the choice of parts, and nothing remembered from before or for later."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(parts, name, value)
        patch.setattr(plans, "_CACHE", schedule.PlanCache())
        parts._split.cache_clear()
        yield
    parts._split.cache_clear()


@given(questions())
def test_tiles_of_all_parts_and_the_dense_picture_are_the_rule(question):
    case, (batch, heads, queries, keys, offsets) = question
    with own_choice(NOMINAL=512, MAX_DEPTH=2):  # a cheap choice; test_any_choice_of_parts_is_the_rule goes deeper
        check_plan(*question)
    dense = case.pattern.to_dense(queries, keys, batch=batch, heads=heads, query_offset=offsets)
    assert torch.equal(dense.expand(batch, heads, queries, keys), truth(*question))


def drawn_costs(seed: int) -> Callable[[Expr, Order], int]:
    """A random cost for every alternative, mostly dearer the more spread leaves are left: odd splits come of it."""
    draw = random.Random(seed)

    def cost(expr: Expr, order: Order) -> int:
        spread = {leaf.key for leaf in expr.leaves() if leaf.spread}
        return draw.choice((10, 1000, 1000)) * 4 ** len(spread) + draw.randrange(10)

    return cost


ANYWHERE = st.one_of(*(leaf for name, leaf in FIXED.items() if name != "prefix"))  # a prefix begins at key 0


@given(questions(2, leaves=ANYWHERE), st.sampled_from([1, 7, 64, 100, -5, -64]))
def test_keys_may_start_anywhere(question, key_start):
    """A rolling cache or a shard holds keys from some position on; left padding begins before 0."""
    with own_choice(NOMINAL=512, MAX_DEPTH=2):
        check_plan(*question, key_start)


def check_forced(case: Case, sizes: Sizes, seed: int) -> int:
    """Compile with drawn costs; the greatest number of parts that came of it."""
    with own_choice(_cost=drawn_costs(seed)):
        return check_plan(case, sizes)


@given(questions(), st.integers(0, 99))
@example(
    (
        Case(
            qkv.strided(3) - qkv.dilated(40, dilation=6),
            oracles.both(oracles.strided(3), oracles.opposite(oracles.dilated(40, dilation=6))),
        ),
        Sizes(1, 1, 70, 70, (0,)),
    ),
    1,
)
def test_any_choice_of_parts_is_the_rule(question, seed):
    check_forced(*question, seed)


@pytest.mark.long
@given(questions(depth=4, lengths=(0, 1, 2, 63, 64, 65, 127, 193, 320, 383, 449)), st.integers(0, 10**6))
def test_larger_expressions_are_the_rule_in_any_parts(question, seed):
    check_plan(*question)
    check_forced(*question, seed)


def named(L: int, S: int) -> dict[str, Case]:
    """Expressions that users write, and the awkward ones among them, made to fit the lengths."""
    o, q, span = oracles, qkv, (0, S)
    runs = torch.arange(S) // 50
    shuffled = torch.randperm(S, generator=torch.Generator().manual_seed(1)) % 5
    scattered = list(range(3, 130, 9))
    docs, packed = (
        Case(q.documents(runs), within(o.documents(runs), span)),
        Case(q.documents(shuffled), within(o.documents(shuffled), span)),
    )
    keep, every = noise(5, L, S), o.opposite
    cases = {
        "full": Case(q.full(), o.full()),
        "nothing": Case(~q.full(), every(o.full())),
        "causal": Case(q.causal(), o.causal()),
        "top left": Case(q.causal(align="top_left"), o.causal()),
        "window": Case(q.causal() & q.window(99), o.window(99)),
        "both sides": Case(q.window(31, 64), o.window(31, 64)),
        "left of a cut": Case(q.window(None, -0), o.window(None, 0)),
        "strided": Case(q.strided(13), o.strided(13)),
        "strided 64": Case(q.strided(64), o.strided(64)),
        "dilated": Case(q.dilated(20, 5, dilation=7), o.dilated(20, 5, dilation=7)),
        "dilated causal": Case(
            q.causal() & (q.window(5) | q.dilated(99, dilation=16)),
            o.both(o.causal(), o.either(o.window(5), o.dilated(99, dilation=16))),
        ),
        "fixed": Case(q.fixed(16, 3), o.fixed(16, 3)),
        "strided minus": Case(q.strided(8) - q.window(7), o.both(o.strided(8), every(o.window(7)))),
        "minus strided": Case(q.window(90) - q.strided(8), o.both(o.window(90), every(o.strided(8)))),
        "both signs": Case(
            (q.strided(8) & q.prefix(40)) | (q.window(70) - q.dilated(300, dilation=8)),
            o.either(o.both(o.strided(8), o.prefix(40)), o.both(o.window(70), every(o.dilated(300, dilation=8)))),
        ),
        "two strides": Case(q.strided(6) | q.strided(10), o.either(o.strided(6), o.strided(10))),
        "stride of a stride": Case(
            q.dilated(99, 99, dilation=12) | (q.causal() & q.dilated(999, dilation=4)),
            o.either(o.dilated(99, 99, dilation=12), o.both(o.causal(), o.dilated(999, dilation=4))),
        ),
        "strided documents": Case(q.strided(8) & docs.pattern, o.both(o.strided(8), docs.rule)),
        "strided or global": Case(q.strided(8) | q.global_tokens(3), o.either(o.strided(8), o.global_tokens(3))),
        "scattered globals": Case(
            q.window(20, 20) | q.global_tokens(scattered), o.either(o.window(20, 20), o.global_tokens(scattered))
        ),
        "without globals": Case(
            q.causal() - q.global_tokens(scattered), o.both(o.causal(), every(o.global_tokens(scattered)))
        ),
        "documents": docs,
        "causal documents": Case(q.causal() & docs.pattern, o.both(o.causal(), docs.rule)),
        "scattered documents": packed,
        "scattered causal": Case(q.causal() & packed.pattern, o.both(o.causal(), packed.rule)),
        "longformer": Case(q.longformer(33, [0, 50]), o.longformer(33, [0, 50])),
        "prefix": Case(q.causal() | q.prefix(30), o.either(o.causal(), o.prefix(30))),
        "block local": Case(q.block_local(100), o.block_local(100)),
        "mask": Case(q.mask(keep=keep), o.mask(keep)),
        "where": Case(q.causal() & q.where(FUNCTIONS[1][0]), o.both(o.causal(), FUNCTIONS[1][1])),
    }
    if S:
        wide = max(w for w in range(1, 20) if S % w == 0)
        grid = S // wide, wide
        rows, columns = (within(o.axial(grid, along), span) for along in ("width", "height"))
        cases["cross"] = Case(q.axial(grid, "width") | q.axial(grid, "height"), o.either(rows, columns))
        cases["tiles"] = Case(q.windows2d(grid, 4, 2), within(o.windows2d(grid, 4, 2), span))
        kernel = min(5, *grid)
        cases["near"] = Case(q.neighborhood(grid, kernel), within(o.neighborhood(grid, kernel), span))
    return cases


NAMED_LENGTHS = [(0, 0), (0, 9), (9, 0), (1, 1), (2, 3), (63, 64), (65, 64), (64, 65), (1, 127), (127, 127), (128, 130)]
NAMED_LENGTHS += [(129, 129), (64, 192), (300, 77), (257, 257)]


@pytest.mark.parametrize("L, S", NAMED_LENGTHS)
def test_named_expressions_are_their_rules(L, S):
    for case in named(L, S).values():
        check_plan(case, Sizes(1, 1, L, S, (case.pattern.offset(L, S),)))


@pytest.mark.parametrize("name", named(1, 1))
def test_named_expressions_are_their_rules_in_any_parts(name):
    case = named(150, 150)[name]
    for seed in range(8):
        check_forced(case, Sizes(1, 1, 150, 150, (case.pattern.offset(150, 150),)), seed)


@pytest.mark.long
@pytest.mark.parametrize("offset", [0, -70, 3, 200])
@pytest.mark.parametrize("L, S", NAMED_LENGTHS)
def test_named_expressions_are_their_rules_at_any_offset_in_any_parts(L, S, offset):
    for case in named(L, S).values():
        check_plan(case, Sizes(1, 1, L, S, (offset,)))
        for seed in range(4):
            check_forced(case, Sizes(1, 1, L, S, (offset,)), seed)


def test_forced_costs_do_make_parts():
    """The forced test says something: three strides come apart into four parts."""
    pattern = qkv.strided(5) | qkv.strided(7) | qkv.strided(11)
    rule = oracles.either(oracles.strided(5), oracles.strided(7), oracles.strided(11))
    found = [check_forced(Case(pattern, rule), Sizes(1, 1, 150, 150, (0,)), seed) for seed in range(20)]
    assert max(found) >= 4


PARTS = {
    "strided(64)": 2,
    "strided(1024)": 2,
    "strided(64) | global_tokens(4)": 2,
    "strided(64) - window(7)": 2,
    "window(8191) - strided(64)": 1,
    "fixed(128, 1)": 2,
    "causal() & (window(31) | dilated(1024, dilation=32))": 2,
    "dilated(1024, dilation=32)": 1,
    "causal() & window(255)": 1,
    f"window(255, 255) | global_tokens({list(range(0, 10000, 500))})": 3,
    "axial((128, 128), 'width') | axial((128, 128), 'height')": 2,
    "windows2d((128, 128), 8)": 1,
    "causal() - causal()": 0,
}


@pytest.mark.parametrize("text, count", PARTS.items())
def test_spread_leaves_get_parts_of_their_own(text, count):
    """The table of normal forms: spread leaves come apart where it pays, and only there."""
    assert qkv.parse(text).plan(16384).parts == count


def test_parts_are_chosen_once_a_pattern_whatever_the_length():
    strided = qkv.strided(64)
    assert [strided.plan(L).parts for L in (4096, 1000, 300, 66)] == [2, 2, 2, 2]
    assert strided.plan(64).parts == 1  # nothing is left beyond the window


def test_each_head_has_its_own_parts_and_equal_heads_share_one():
    plan = qkv.per_head([qkv.strided(32), qkv.window(63), qkv.strided(32)]).plan(500, heads=3)
    assert plan.index.tolist() == [[0, 1, 0]]
    assert [len(member.parts) for member in plan.members] == [2, 1]
    assert plan.pairs == 2 * qkv.strided(32).count(500) + qkv.window(63).count(500)
    assert plan.tiles == 2 * plan.members[0].tiles + plan.members[1].tiles
    assert plan.parts == 2


def test_batch_rows_that_mean_the_same_share_one_schedule():
    plan = qkv.key_lengths([70, 100, 70]).plan(100, batch=3, heads=2)
    assert plan.index.tolist() == [[0], [1], [0]]
    assert plan.pairs == 2 * 100 * (70 + 100 + 70)
    assert qkv.causal().plan(100, batch=3, heads=2).index.shape == (1, 1)
    assert qkv.causal().plan(100, batch=2, query_offset=[0, 5]).index.tolist() == [[0], [1]]
    assert qkv.causal().plan(100, batch=2, query_offset=[5, 5]).index.tolist() == [[0]]


def test_no_batch_rows_or_heads_make_an_empty_plan():
    assert qkv.causal().plan(10, batch=0).pairs == 0
    assert qkv.key_lengths([]).plan(10, batch=0).pairs == 0
    assert qkv.causal().plan(10, heads=0).pairs == 0


MILLION = 1 << 20
TILES = {  # at L = S = 1,048,576: parts and tiles, as an independent prototype counted them
    "causal() & window(255)": (1, 81_910),
    "strided(1024)": (2, 417_656),
    "fixed(1024)": (2, 278_272),
    "dilated(1024, dilation=32)": (1, 274_176),
}
MORE_TILES = {
    "causal()": (1, 134_225_920),
    "window(4095)": (1, 1_062_880),
    "window(255, 255) | global_tokens(4)": (1, 180_194),
    "block_local(128)": (1, 32_768),
    "block_local(100)": (1, 58_324),
    "random_blocks(16, 64, 0)": (1, 262_024),
    "strided(64)": (2, 2_138_111),
    "strided(1000)": (2, 431_392),
    "strided(1021)": (2, 434_605),
    "causal() & (window(31) | dilated(1024, dilation=32))": (2, 306_943),
    "fixed(1024, 8)": (2, 1_193_984),
    "strided(1024) | global_tokens(4)": (2, 450_406),
    "strided(1024) - window(7)": (2, 417_656),
    "dilated(64, dilation=65536)": (1, 16_384),
    "axial((1024, 1024), 'width') | axial((1024, 1024), 'height')": (2, 524_288),
    "neighborhood((1024, 1024), 7)": (1, 329_728),
    "windows2d((1024, 1024), 8)": (1, 16_384),
}


def million(text: str) -> Compiled:
    """Compiled past the cache, which remembers from one test to the next."""
    extent = Extent(MILLION, MILLION)
    return compile_expr(specialise(qkv.parse(text).expr, 0, 0, extent), extent)


@pytest.mark.parametrize("text, expected", TILES.items())
def test_a_million_tokens_take_the_tiles_of_the_pattern(text, expected):
    compiled = million(text)
    assert (len(compiled.parts), compiled.tiles) == expected
    assert sum(part.schedule.nbytes for part in compiled.parts) < 1_000_000
    assert sum(len(part.schedule.masks) for part in compiled.parts) <= 70


@pytest.mark.long
@pytest.mark.parametrize("text, expected", MORE_TILES.items())
def test_a_million_tokens_take_the_tiles_of_any_pattern(text, expected):
    compiled = million(text)
    assert (len(compiled.parts), compiled.tiles) == expected
    assert sum(part.schedule.nbytes for part in compiled.parts) < 3_000_000


def test_a_million_tokens_look_at_a_handful_of_tiles(monkeypatch):
    """Building the window never evaluates more than its few kinds of tiles, nor holds anything of L squared."""
    asked, pairs = [], []
    original = Offsets.contains

    def spy(self, i, j):
        answer = original(self, i, j)
        asked.append(self.key)
        pairs.append(answer.size)
        return answer

    monkeypatch.setattr(Offsets, "contains", spy)
    tracemalloc.start()
    compiled = million("causal() & window(255)")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert compiled.pairs == MILLION * 256 - 255 * 256 // 2
    assert len(asked) == len(set(asked)) == 2  # each leaf once
    assert max(pairs) <= 4 * TILE * TILE
    assert peak < 100_000_000


@pytest.mark.parametrize(
    "text, length, tiles",
    [
        ("full()", 100, 0),
        ("prefix(64)", 130, 0),
        ("block_local(64)", 130, 0),
        ("random_blocks(2, 64, 0)", 130, 0),
        ("causal()", 130, 3),
        ("window(64)", 256, 7),
        ("axial((100, 100), 'height')", 10_000, 300),  # of the four tiles of each class, those with padding
    ],
)
def test_only_tiles_in_doubt_are_looked_at(text, length, tiles):
    """The last tile, short as it is, is full without a look where the interval reaches the end."""
    members = qkv.parse(text).plan(length).members
    assert sum(part.schedule.uncertain for part in members[0].parts) == tiles


def test_decoding_a_million_keys_takes_what_it_sees():
    """One query at the end: the tiles of its own row, not of all keys."""
    for text, keys, tiles in [
        ("causal() & window(255)", 256, 5),
        ("strided(1024)", 2047, 34),
        ("fixed(1024)", 2047, 32),
        ("dilated(1024, dilation=32)", 1025, 17),
    ]:
        plan = qkv.parse(text).plan(1, MILLION)
        assert plan.pairs == keys
        assert plan.tiles <= tiles


def test_equal_questions_are_compiled_once():
    first, again = (qkv.parse("causal() & window(17)").plan(90) for _ in range(2))
    assert first.members[0] is again.members[0]
    assert qkv.parse("causal() & window(17)").plan(91).members[0] is not first.members[0]
    assert qkv.parse("causal() & window(17)").plan(90, query_offset=1).members[0] is not first.members[0]


def test_the_cache_forgets_the_oldest_and_stays_within_its_bound(monkeypatch):
    monkeypatch.setenv("QKV_PLAN_CACHE_MB", "1")
    cache, extent = schedule.PlanCache(), Extent(30_000, 30_000)
    exprs = [qkv.strided(stride).expr for stride in (50, 60, 70, 80)]
    made = [cache.compiled(expr, extent) for expr in exprs]
    assert sum(one.nbytes for one in made) > 1 << 20
    assert cache._nbytes == sum(one.nbytes for one in cache._entries.values()) <= 1 << 20
    assert cache.compiled(exprs[-1], extent) is made[-1]
    assert cache.compiled(exprs[0], extent) is not made[0]


def test_content_is_not_confused_by_the_cache():
    """Masks of one shape and different content, and one function object beside another, are different questions."""
    for n in range(4):
        keep = noise(n, 20, 20)
        assert qkv.mask(keep=keep).count(20) == int(keep.sum())
        assert qkv.where(lambda b, h, i, j, n=n: j < n + 0 * i).count(20) == 20 * n


def test_count_and_density_of_known_sizes():
    assert qkv.causal().count(1000) == 1000 * 1001 // 2
    assert qkv.causal().count(3, 5) == 3 + 4 + 5
    assert qkv.causal(align="top_left").count(3, 5) == 1 + 2 + 3
    assert qkv.full().density(7, 3) == 1.0
    assert qkv.window(0).density(8) == 1 / 8
    assert qkv.causal().density(0) == 0.0
    assert qkv.key_lengths([1, 2]).count(3, 4, batch=2, heads=5) == 5 * 3 * (1 + 2)
    assert qkv.key_lengths([1, 2]).density(3, 4, batch=2, heads=5) == pytest.approx(9 / 24)
