"""The public names of `qkv`, frozen, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import qkv

CALLS = {"attention", "scaled_dot_product_attention", "varlen_attention", "merge", "plan", "explain"}
CACHES = {"KVCache", "PagedKVCache", "RollingKVCache"}
SCORES = {"alibi", "alibi_slopes", "relative"}
PATTERNS = {
    *("full", "causal", "window", "sliding_window", "dilated", "strided", "fixed", "global_tokens", "prefix"),
    *("random_blocks", "block_local", "documents", "key_lengths", "key_padding", "mask", "blocks", "neighborhood"),
    *("windows2d", "axial", "where", "longformer", "bigbird", "sparse_transformer", "per_head", "parse"),
}
LINEAR = {
    *("linear_attention", "retention", "gated_linear_attention", "delta_rule", "gated_delta_rule"),
    *("kimi_delta_attention", "ssd", "short_convolution", "gated_rms_norm", "l2_norm", "RecurrentState"),
    *("FavorFeatures", "HedgehogFeatures", "SoftmaxFeatures", "TaylorFeatures"),
}
RECORDS = {"AuxRequest", "AuxOutput", "TopK", "Pattern", "Plan", "Merged"}
ERRORS = {  # in qkv.errors
    *("QkvError", "ShapeError", "MaskError", "ValueOutOfRange", "LayoutError", "DTypeError", "DeviceError"),
    *("UnsupportedError", "SizeLimit", "UnknownName", "PatternSyntaxError", "CheckpointError"),
    *("InvertedMaskWarning", "AddedMaskWarning"),
}
PUBLIC = CALLS | CACHES | SCORES | PATTERNS | LINEAR | RECORDS


def names(module: ModuleType) -> set[str]:
    """Public names that are not submodules (those appear at the root as soon as something imports them)."""
    return {
        name for name in vars(module) if not name.startswith("_") and not isinstance(getattr(module, name), ModuleType)
    }


def test_public_names_are_these():
    assert names(qkv) == PUBLIC


def test_errors_are_these():
    assert {name for name, value in vars(qkv.errors).items() if isinstance(value, type)} - {"Iterable"} == ERRORS


def test_version_is_that_of_the_installation():
    assert qkv.__version__ == "0.1.0"


def test_every_public_name_has_a_docstring_of_its_own():
    assert [name for name in sorted(PUBLIC) if not (getattr(qkv, name).__doc__ or "").strip()] == []


def test_names_that_are_also_modules_are_the_functions():
    assert callable(qkv.attention)
    assert callable(qkv.merge)


def test_import_loads_no_optional_package():
    text = "import sys, qkv; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "torch" in loaded
    assert loaded & {"matplotlib", "safetensors", "tokenizers", "transformers", "huggingface_hub"} == set()
