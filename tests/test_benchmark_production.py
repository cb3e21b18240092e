"""Suite `production` of the benchmarks: 16 bits through the gate, decoding and packed calls and their peers, limits."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import qkv
from qkv import causal

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
contest, gate, goals, limits = map(import_module, ("contest", "gate", "goals", "limits"))
peak, peers, production, registry = map(import_module, ("peak", "peers", "production", "registry"))
report, run, timing = map(import_module, ("contest_report", "run", "timing"))

right, CASES = registry.attention, registry.BY_NAME
SIXTEEN = [torch.bfloat16, torch.float16]


def share(name, case, tokens, direction="forward", dtype=torch.float32, through="attention", head_dim=64) -> float:
    setting = contest.Setting(direction, tokens, head_dim, dtype)
    contest.expected.cache_clear()
    return contest.entrant(name, CASES[case], setting, through).share


@pytest.fixture(params=["whole", "sampled"])
def tokens(request, monkeypatch) -> int:
    """A length that the gate compares wholly, or one of which it takes a sample."""
    if request.param == "sampled":
        monkeypatch.setattr(gate, "WHOLE", 64)
    return 197 if request.param == "whole" else 453  # 453 mod 8 = 5: the head whose columns are sampled


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("case", ["dense", "causal", "window", "packed", "causal-dropout"])
def test_gate_passes_sixteen_bits(case, dtype, tokens):
    torch.manual_seed(0)
    for name in ("blockwise", "sdpa"):
        assert 0.05 < share(name, case, tokens, "forward+backward", dtype) < 1


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_gate_allows_torch_its_sums_in_sixteen_bits(dtype, monkeypatch):
    assert share("sdpa", "causal", 700, "backward", dtype) < 1
    monkeypatch.setattr(contest, "torch_rounds", lambda case, tokens: gate.OURS_ROUND)
    with pytest.raises(gate.Refused, match=r"^sdpa, .* backward: the gradient of value"):
        share("sdpa", "causal", 700, "backward", dtype)


@pytest.mark.parametrize(
    "case, tokens, query, key",
    [("causal", 150, 2, 6), ("causal", 700, 3, 12), ("dense", 2048, 5, 9), ("packed", 49_200, 9, 17)],
)
def test_roundings_of_torch_are_its_blocks(case, tokens, query, key):
    expected = {"output": 1, "query": query, "key": key, "value": key}
    assert gate.torch_rounds(CASES[case], tokens) == expected


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize(
    "wrong, what",
    [
        (lambda q, k, v, **given: right(q, k, v, scale=1.02 * q.shape[-1] ** -0.5, **given), "output"),
        (lambda q, k, v, **given: right(q, k, v, query_offset=1, **given), "output"),
        (lambda q, k, v, **given: right(q, k, v, **given) * torch.nan, "output"),
        (lambda q, k, v, **given: right(q, k + 0.1 * (k - k.detach()), v, **given), "gradient of key"),
        (lambda q, k, v, **given: right(q, k, v + 0.1 * (v - v.detach()), **given), "gradient of value"),
        (lambda q, k, v, **given: right(q + 0.1 * (q - q.detach()), k, v, **given), "gradient of query"),
    ],
)
def test_gate_refuses_what_is_wrong_in_sixteen_bits(wrong, what, dtype, tokens, monkeypatch):
    monkeypatch.setattr(registry, "attention", wrong)
    told = rf"^ours, causal at {tokens} tokens, D 64, {str(dtype)[6:]}, forward\+backward: the {what} is"
    with pytest.raises(gate.Refused, match=told):
        share("blockwise", "causal", tokens, "forward+backward", dtype)


def test_rounding_is_for_sixteen_bits_alone():
    for dtype in (torch.float32, torch.bfloat16):
        data = registry.make_data(150, CASES["causal"], dtype=dtype)
        assert {claim.rounding is None for claim in gate.claims(CASES["causal"], data)} == {dtype == torch.float32}


def test_sampled_columns_in_sixteen_bits_are_the_whole_ones():
    case, dtype = CASES["packed"], torch.bfloat16
    data = registry.make_data(300, case, dtype=dtype)
    part = gate.Part(0, 300 % 8, torch.arange(300))
    whole = {claim.name: claim for claim in gate._oracle(case, data, part, ("query", "key", "value"))}
    for claim in gate._columns(case, data):
        for one in ("truth", "rounding"):
            expected = getattr(whole[claim.name], one)[0, 0, claim.place[2]]
            torch.testing.assert_close(getattr(claim, one), expected, rtol=1e-9, atol=1e-12)
        assert (claim.bound <= 1.000001 * whole[claim.name].bound[0, 0, claim.place[2]]).all()
        assert (claim.bound > 0.5 * whole[claim.name].bound[0, 0, claim.place[2]]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name, case, direction",
    [
        ("sdpa", "decode", "forward"),
        ("sdpa", "decode-window", "forward"),
        ("sdpa-sliced", "decode-window", "forward"),
        ("sdpa", "decode-batch", "forward"),
        ("sdpa-apart", "decode-batch", "forward"),
        ("sdpa-apart", "packed", "forward+backward"),
        ("sdpa-padded", "packed", "forward+backward"),
        ("sdpa-padded-causal", "packed", "backward"),
    ],
)
def test_torch_answers_the_very_case(name, case, direction, dtype):
    assert 0 < share(name, case, 1200, direction, dtype) < 1


@pytest.mark.parametrize(
    "name, case, reason",
    [
        ("sdpa-sliced", "decode", "slices the window"),
        ("sdpa-sliced", "decode-batch", "slices the window"),
        ("sdpa-apart", "decode", "takes documents"),
        ("sdpa-padded", "decode-batch", "pads documents"),
        ("sdpa-padded", "causal", "pads documents"),
        ("x-transformers", "decode", "computes dense and"),
    ],
)
def test_torch_s_forms_refuse_other_cases(name, case, reason):
    with pytest.raises(contest.NotMeasured, match=f"^{reason}"):
        share(name, case, 64)


OURS = [
    ("decode", "attention"),
    ("decode", "cache"),
    ("decode-window", "attention"),
    ("decode-window", "rolling"),
    ("decode-batch", "cache"),
    ("packed", "varlen"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case, through", OURS)
def test_ours_answers_every_production_case(case, through, dtype):
    assert 0 < share("blockwise", case, 1200, "forward", dtype, through) < 0.9


@pytest.mark.parametrize("case, through", OURS)
def test_wrong_production_call_is_refused(case, through, monkeypatch):
    def louder(call):
        return lambda *tensors, **given: 1.02 * call(*tensors, **given)

    monkeypatch.setattr(registry, "attention", louder(registry.attention))
    monkeypatch.setattr(qkv, "varlen_attention", louder(qkv.varlen_attention))
    for kind in (qkv.KVCache, qkv.RollingKVCache):
        monkeypatch.setattr(kind, "attend", louder(kind.attend))
    who = "ours" if through == "attention" else f"ours by {through}"
    with pytest.raises(gate.Refused, match=rf"^{who}, {case} at 1,200 tokens, D 64, forward: the output is"):
        share("blockwise", case, 1200, through=through)


def test_each_run_of_a_cache_is_the_next_token(monkeypatch):
    lengths, attend = [], qkv.KVCache.attend

    def counted(cache, *tensors, **given):
        output = attend(cache, *tensors, **given)
        lengths.append(cache.length)
        return output

    monkeypatch.setattr(qkv.KVCache, "attend", counted)
    case = CASES["decode"]
    call = production.cached(case, registry.make_data(40, case), "blockwise").prepare("forward")
    for _ in range(3):
        call.run()
    assert lengths == [40, 41, 42]
    assert production.ROOM > 41 + 41 + 3  # pairs with SDPA, pairs with the read loop


def test_packed_documents_are_of_100_to_4000_tokens():
    lengths = registry.packed_lengths(registry.PACKED_TOKENS)
    assert (len(lengths), min(lengths), max(lengths)) == (24, 100, 4000)
    assert lengths != sorted(lengths)
    for tokens in (24, 197, 2048, registry.PACKED_TOKENS):
        assert sum(registry.packed_lengths(tokens)) == tokens
    assert max(registry.batch_lengths(8192)) == 8192
    assert len(registry.batch_lengths(8192)) == len(set(registry.batch_lengths(8192))) == 8


def test_padded_call_gets_padded_tensors_and_a_mask_of_what_is_theirs():
    given, case = {}, CASES["packed"]
    data = registry.make_data(197, case)
    sizes = registry.packed_lengths(197)

    def seen(*tensors, **options):
        given.update(options, shapes={tensor.shape for tensor in tensors})
        return tensors[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(production.F, "scaled_dot_product_attention", seen)
        result = production.sdpa_padded(case, data, is_masked=True).run("forward")
        assert torch.equal(result["output"], data.query)
    assert given["shapes"] == {torch.Size([24, 8, max(sizes), 64])}
    assert not given["is_causal"]
    for keep, size in zip(given["attn_mask"][:, 0], sizes, strict=True):
        assert torch.equal(keep[:size, :size], causal().to_dense(size))
        assert not keep[:, size:].any()


def test_names_say_type_and_way():
    race = goals.Race("forward", "decode", 8192, 128, dtype=torch.bfloat16, through="cache")
    assert race.name == "bf16/forward/decode/8192/D128/cache/sdpa"
    assert goals.Race("forward", "causal", 512, dtype=torch.float16).name == "fp16/forward/causal/512/D64/sdpa"
    quick = {figure.name for figure in goals.chosen([], quick=True, threads=1, suite="production")}
    assert {"forward/decode/2048/D128/cache/sdpa", "bf16/forward/packed/2048/D64/varlen/sdpa-apart"} < quick
    assert not {name for name in quick if "8192" in name or "65536" in name}


@pytest.mark.parametrize(
    "case, tokens, keys", [("decode", 300, [300]), ("decode-window", 1200, [1024]), ("decode-batch", 160, None)]
)
def test_what_a_call_must_read_is_what_it_sees(case, tokens, keys):
    data = registry.make_data(tokens, CASES[case], 16)
    pieces = limits.visible(CASES[case], data)
    keys = keys or registry.batch_lengths(tokens)
    assert sum(piece.nbytes for piece in pieces) == 2 * 8 * 16 * 4 * sum(keys)
    assert all(piece.is_contiguous() for piece in pieces)
    last = data.key[0, 0, keys[0] - 1] if case != "decode-window" else data.key[0, 0, -1]
    assert pieces[0][-1].data_ptr() == last.data_ptr()


def test_decoding_is_measured_beside_a_loop_that_reads(monkeypatch):
    monkeypatch.setattr(peak, "reader", lambda pieces: lambda: None)

    def interleave(mine, read, first, **given):
        return [timing.Pair(timing.Sample(each, 9.0), timing.Sample(0.5, 9.0)) for each in (1.0, 2.0, 0.5)]

    monkeypatch.setattr(limits, "interleave", interleave)
    figure = goals.Race("forward", "decode", 100, 16, goals.READING)
    settings = {"name": "production", "figures": (figure,), "backend": "blockwise"}
    [outcome] = contest.Contest(**settings, threads=1, budget=0.0, least=3, most=3).measure(lambda question: None)
    assert (outcome.of_peak, outcome.loop) == (0.5, "read loop")
    assert outcome.rate == 2 * 8 * 100 * 16 * 4 / 0.5
    assert outcome.their_of_peak == pytest.approx(0.5 / outcome.theirs)
    assert outcome.limit == pytest.approx(outcome.value / 0.5)
    [outcome] = contest.Contest(**settings, threads=2, budget=0.0, least=3, most=3).measure(lambda question: None)
    assert outcome.of_peak is None


def test_products_of_bfloat16_are_faster_where_there_is_a_unit_for_them():
    about, rates = Path("/proc/cpuinfo"), {unit: peak.products(unit) for unit in peak.ROUNDS}
    known = about.read_text(encoding="utf-8") if about.exists() else ""
    for unit, flag, slower, gain in (("dot", "avx512_bf16", "fma", 1.2), ("tile", "amx_bf16", "dot", 2)):
        if rates[unit] is not None:
            assert flag in known
            assert gain * rates[slower] < rates[unit] < 5e13
    best = {rate: peak.NAMES[unit] for unit, rate in rates.items() if rate}
    if best:
        assert peak.most(torch.bfloat16).name == best[max(best)]
        assert peak.most(torch.float16).name == "FMA loop"


@pytest.mark.skipif(peak.loop() is None, reason="needs a C compiler")
def test_read_loop_reads_every_byte():
    pieces = [torch.randint(256, (size,), dtype=torch.uint8) for size in (1, 511, 512, 100_003)]
    words = [torch.cat([piece, torch.zeros(-len(piece) % 8, dtype=torch.uint8)]) for piece in pieces]
    read = peak.reader(pieces)

    def folded(number):
        return sum(1 << bit for bit in range(8) if (number >> bit & 0x0101010101010101).bit_count() % 2)

    expected = 0
    for word in words:
        for byte in word.tolist():
            expected ^= byte
    assert folded(read() & (1 << 64) - 1) == expected
    pieces[-1][77_777] ^= 4
    assert folded(read() & (1 << 64) - 1) == expected ^ 4


@pytest.mark.skipif(peak.loop() is None, reason="needs a C compiler")
def test_read_loop_is_as_fast_as_memory():
    buffer = torch.ones(16 << 20)
    read = peak.reader([buffer])
    read()
    assert 5e8 < buffer.nbytes / min(timing.timed(read)[0].cpu for _ in range(3)) < 1e12
    with pytest.raises(AssertionError):
        peak.reader([buffer.reshape(4096, 4096)[:, ::2]])


class NoProbe:
    def ask(self, question):
        return None

    def close(self):
        pass


def test_run_prints_and_writes(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(run, "MemoryProbe", NoProbe)
    monkeypatch.setattr(report, "plot", lambda rows, path, title: False)
    asked = ["--suite", "production", "--backend", "blockwise", "--out", str(tmp_path), "--name", "small", "--quick"]
    assert run.main([*asked, "--only", "bf16/forward/causal/512,bf16/forward/decode/2048/D128/sdpa"]) == 0
    printed = capsys.readouterr().out
    record = json.loads((tmp_path / "small.json").read_text(encoding="utf-8"))
    names = ["bf16/forward/causal/512/D64/sdpa", "bf16/forward/decode/2048/D128/sdpa"]
    assert [figure["name"] for figure in record["figures"]] == names
    assert all(name in printed for name in names)
    assert record["sizes"]["packed"] == "24 documents of 100 to 4,000 tokens at 49,200"
    assert "bf16 dot-product loop: " in printed
    if peak.loop() is not None:
        assert [figure["loop"] for figure in record["figures"]] == [peak.most(torch.bfloat16).name, "read loop"]
