"""Plans of few queries: the same pairs as the general path, each once, at the cost of what the queries see."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import oracles
import qkv
from qkv.patterns import few, plans, schedule
from qkv.patterns.axis import TILE, Natural, Ordered
from qkv.patterns.expr import specialise
from qkv.patterns.few import FEW, compile_few, look
from qkv.patterns.leaf import Expr, Extent, Leaf
from qkv.patterns.leaves.keys import Keys
from qkv.patterns.leaves.offsets import Congruent, Offsets
from qkv.patterns.schedule import Compiled, compile_expr
from strategies import FIXED, Case, Sizes, cases, choice, noise
from tiles import check, check_plan

KEYS = (0, 1, 2, 63, 64, 65, 127, 128, 129, 193, 320, 600)
TEXTS = [  # constructors of numbers alone, and what users make of them
    "full()", "~full()", "causal()", "window(700)", "window(31, 64)", "window(None, 5)", "sliding_window(256)",
    "strided(64)", "strided(3)", "strided(600)", "dilated(40, 3, dilation=17)", "fixed(128)", "fixed(50, 3)",
    "prefix(70)", "global_tokens(4)", "global_tokens([3, 900, 1000, 1001])", "block_local(100)",
    f"global_tokens({list(range(1, 3000, 10))})", "random_blocks(3, 64, 1)", "random_blocks(2, 33, 5, ahead=True)",
    "longformer(200, 3)", "bigbird(3, 65, 2, 9)", "causal() & (window(300) | prefix(4))",
    "window(200, 200) | global_tokens([0, 50, 2000])", "strided(16) - window(100)", "window(2000) - strided(16)",
    "causal() & (window(31) | dilated(60, dilation=32))", "~strided(8)", "strided(6) | strided(10)",
    "causal() - global_tokens([5, 800, 1700])", "block_local(7) | strided(90)",
    "dilated(20, dilation=40) | global_tokens([0, 100, 200, 300, 400, 500])",
]  # fmt: skip


@st.composite
def few_queries(draw: st.DrawFn, batches: int = 2) -> Sizes:
    queries, keys = draw(choice(0, 1, 1, 1, 2, 3, 7, 8, 9, 15, 16)), draw(choice(*KEYS))
    batch = draw(st.integers(1, batches))
    offset = st.sampled_from([keys - queries, keys - queries, 0, 1, -1, -queries, 64, -65, keys, keys + 70, 17, 120])
    count = batch if draw(st.booleans()) else 1
    return Sizes(batch, draw(st.integers(1, 2)), queries, keys, tuple(draw(offset) for _ in range(count)))


@st.composite
def questions(draw: st.DrawFn, leaves: st.SearchStrategy[Case] | None = None) -> tuple[Case, Sizes]:
    asked = draw(few_queries())
    return draw(cases(asked, 2, leaves)), asked


@given(questions())
def test_few_queries_see_the_rule(question):
    check_plan(*question)


ANYWHERE = st.one_of(*(leaf for name, leaf in FIXED.items() if name != "prefix"))  # a prefix begins at key 0


@given(questions(ANYWHERE), st.sampled_from([1, 7, 64, 100, -5, -64]))
@example((Case(qkv.strided(3), oracles.strided(3)), Sizes(1, 1, 2, 320, (400,))), 100)
def test_keys_may_start_anywhere(question, key_start):
    check_plan(*question, key_start)


def parts_of(expr: Expr, extent: Extent) -> tuple[Compiled, Compiled]:
    """Both ways: from few queries, and the general path."""
    bound = specialise(expr, 0, 0, extent)
    return listed(bound, extent), compile_expr(bound, extent)


def listed(bound: Expr, extent: Extent) -> Compiled:
    """Past the cache, which remembers from one test to the next."""
    return compile_few(bound, extent, look(bound, extent))


def check_form(compiled: Compiled) -> None:
    """What the native core relies on."""
    for part in compiled.parts:
        made = part.schedule
        assert isinstance(part.queries, Natural)
        arrays = [made.row_ptr, made.runs, made.partial_ptr, made.partial]
        if isinstance(part.keys, Ordered):
            arrays += [part.keys.index, part.keys.group]
            assert (np.diff(part.keys.index) > 0).all()
        assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in arrays)
        assert made.masks.dtype == np.uint64 and made.masks.flags.c_contiguous and made.masks.shape[1:] == (TILE,)
        assert made.runs.shape[1:] == made.partial.shape[1:] == (2,)
        assert made.row_ptr.tolist() == [0, len(made.runs)] and made.partial_ptr.tolist() == [0, len(made.partial)]
        assert (np.diff(made.runs.ravel()) > 0).all(), "runs that touch are not joined"
        assert (np.diff(made.partial[:, 0]) > 0).all()
        assert len({words.tobytes() for words in made.masks}) == len(made.masks)
        assert set(made.partial[:, 1].tolist()) == set(range(len(made.masks)))


@pytest.mark.parametrize("text", TEXTS)
def test_both_ways_agree_where_keys_are_many(text):
    """At the end of many keys, in their middle, beyond them and before them; with keys that do not start at 0."""
    pattern = qkv.parse(text)
    S = 3001
    for queries, start, key_start in [(1, S - 1, 0), (16, S - 16, 0), (9, 1500, 0), (3, S + 50, 0), (2, -1, 0),
                                      (1, S, 700), (5, S + 600, 650)]:  # fmt: skip
        extent = Extent(queries, S, start, key_start)
        mine, general = parts_of(pattern.expr, extent)
        want = np.zeros((queries, S), dtype=bool)
        i, j = start + np.arange(queries), key_start + np.arange(S)
        want |= pattern.allowed(i[None], j[None], batch=1, heads=1, extents=[extent])[0, 0]
        check(mine, want, (start, key_start))
        check_form(mine)
        assert mine.pairs == general.pairs
        assert mine.tiles <= 1.1 * general.tiles + 4 or queries > 1


CONTENT = {
    "documents": lambda S: qkv.documents(torch.arange(S) // 250),
    "scattered": lambda S: qkv.documents(torch.arange(S) * 7919 % 97 % 5) & qkv.causal(),
    "cu_seqlens": lambda S: qkv.causal() & qkv.documents(cu_seqlens=[0, 3, 3, 1000, S - 64, S]),
    "mask": lambda S: qkv.mask(keep=noise(1, 5, S)),
    "rare": lambda S: qkv.mask(keep=noise(1, 5, S, share=0.01)),
    "mask of keys": lambda S: qkv.mask(keep=noise(2, 1, S, share=0.9)) & qkv.window(900),
    "blocks": lambda S: qkv.blocks(noise(3, 40, 40), 100),
    "many blocks": lambda S: qkv.blocks(noise(3, 410, 410), 10),
    "where": lambda S: qkv.causal() & qkv.where(lambda b, h, i, j: (i + 2 * j) % 3 == 0),
    "windowed where": lambda S: (qkv.window(70) | qkv.prefix(9)) & qkv.where(lambda b, h, i, j: (i + j) % 3 > 0),
    "near": lambda S: qkv.neighborhood((50, S // 50), 7),
    "swin": lambda S: qkv.windows2d((50, S // 50), 8, 3),
    "cross": lambda S: qkv.axial((50, S // 50), "width") | qkv.axial((50, S // 50), "height"),
}


@pytest.mark.parametrize("name, start", [*product(CONTENT, [2995, 1300, 0])])
def test_both_ways_agree_on_content(name, start):
    S = 3000
    pattern, extent = CONTENT[name](S), Extent(5, S, start, 0)
    mine, general = parts_of(pattern.expr, extent)
    check(mine, pattern.to_dense(5, S, query_offset=start).numpy(), (start, 0))
    check_form(mine)
    assert mine.pairs == general.pairs


def test_batch_rows_of_different_length_and_heads_have_their_own():
    pattern = qkv.per_head([qkv.causal() & qkv.window(99), qkv.strided(32), qkv.causal() & qkv.window(99)])
    plan = pattern.plan(1, 2000, batch=4, heads=3, query_offset=[1999, 500, 1999, 0])
    assert plan.index.tolist() == [[0, 1, 0], [2, 3, 2], [0, 1, 0], [4, 4, 4]] or len(plan.members) == 6
    dense = pattern.to_dense(1, 2000, batch=4, heads=3, query_offset=[1999, 500, 1999, 0]).numpy()
    for b, h in np.ndindex(4, 3):
        check(plan.members[plan.index[b, h]], dense[b, h], ([1999, 500, 1999, 0][b], 0))
    assert plan.pairs == dense.sum()


def million(text: str, queries: int = 1) -> Compiled:
    extent = Extent(queries, 1 << 20, (1 << 20) - queries)
    return listed(specialise(qkv.parse(text).expr, 0, 0, extent), extent)


@pytest.mark.parametrize("text, shape", [
    ("full()", [(1, 0)]),
    ("causal() & window(255)", [(1, 0)]),
    ("causal() & (window(254) | prefix(4))", [(1, 2)]),
    ("strided(1024)", [(1, 0), (1, 0)]),
    ("strided(64)", [(1, 0), (1, 0)]),
    ("fixed(1024)", [(1, 0), (1, 0)]),
    ("dilated(1024, dilation=32)", [(1, 0)]),
    ("neighborhood((1024, 1024), 7)", [(1, 0)]),  # 7 rows of 7 pixels in one tile
])  # fmt: skip
def test_scattered_keys_are_gathered_and_all_else_is_read_in_place(text, shape):
    """Runs of full blocks and partial blocks of each part."""
    parts = million(text).parts
    assert [(len(part.schedule.runs), len(part.schedule.partial)) for part in parts] == shape
    gathered = [isinstance(part.keys, Ordered) for part in parts]
    scattered = text.startswith(("strided", "fixed", "dilated", "neighborhood"))
    assert gathered == [False] * (len(parts) - scattered) + [True] * scattered


def test_a_few_sparse_blocks_are_read_in_place():
    """A part of its own costs as much as a few tiles."""
    for tokens, count in [([100, 1000], 1), ([100, 1000, 2000, 3000, 4000], 2)]:
        plan = (qkv.window(127) | qkv.global_tokens(tokens)).plan(1, 6400)
        assert plan.parts == count
        assert plan.pairs == 128 + len(tokens)


def test_nothing_is_looked_at_where_the_leaves_know(monkeypatch):
    def refuse(self, *arguments):
        raise AssertionError("looked at keys one by one")

    for kind in (Offsets, Keys, Leaf):
        monkeypatch.setattr(kind, "marks", refuse)
    monkeypatch.setattr(Offsets, "contains", refuse)
    for text in ("causal()", "window(255) | global_tokens(4)", "block_local(128)", "random_blocks(3, 64, 0)"):
        million(text, 3)
    with pytest.raises(AssertionError, match="looked at"):
        million("strided(64)")


def test_only_keys_in_doubt_are_looked_at():
    asked = []

    def fn(b, h, i, j):
        asked.append((int(j.min()), int(j.max()), j.numel()))
        return (i + j) % 2 == 0

    pattern = (qkv.causal() & qkv.window(127) | qkv.prefix(10)) & qkv.where(fn)
    S = 100_000
    plan = pattern.plan(1, S)
    probes = [one for one in asked if one[2] == S]
    looked = [one for one in asked if one[2] < S]
    assert len(asked) - len(looked) == len(probes) > 0  # to see on which axes the answer depends
    assert looked == [(0, 9, 10), (S - 128, S - 1, 128)]
    assert plan.pairs == 5 + 64
    assert plan.members[0].parts[0].schedule.uncertain <= 4


def test_plans_that_are_cheaper_to_make_than_to_keep_are_not_kept(monkeypatch):
    monkeypatch.setattr(plans, "_CACHE", schedule.PlanCache())
    monkeypatch.setattr(plans, "_FEW", schedule.PlanCache(share=8))
    kept = qkv.causal().plan(300).members[0]
    for S in range(1000, 1050):
        (qkv.causal() & qkv.window(99)).plan(1, S)
        qkv.strided(16).plan(1, S)
    assert list(plans._CACHE._entries.values()) == [kept]
    assert len(plans._FEW._entries) == 50
    assert qkv.strided(16).plan(1, 1049).members[0] is qkv.strided(16).plan(1, 1049).members[0]


def test_plans_of_few_queries_take_a_share_of_the_cache(monkeypatch):
    assert (plans._CACHE._share, plans._FEW._share) == (1, 8)
    monkeypatch.setenv("QKV_PLAN_CACHE_MB", "1")
    cache = schedule.PlanCache(share=8)
    for S in range(20_000, 20_100):
        cache.compiled(qkv.strided(16).expr, Extent(1, S, S - 1), listed)
    assert 2 < len(cache._entries) < 100
    assert cache._nbytes == sum(one.nbytes for one in cache._entries.values()) <= 1 << 17


def test_up_to_sixteen_queries_are_few(monkeypatch):
    asked = []
    original = few.look
    monkeypatch.setattr(plans, "look", lambda expr, extent: asked.append(extent.queries) or original(expr, extent))
    for queries in (1, FEW, FEW + 1, 64):
        qkv.causal().plan(queries, 777)
    assert asked == [1, 16]


def test_residues_of_one_query_are_not_searched_for():
    """One query's residue class is a slice of the keys: nothing is divided key by key."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Congruent, "contains", None)
        assert million("strided(64)").pairs == 64 + (1 << 14) - 1
