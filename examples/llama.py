"""One Llama, four patterns: what each writes itself down as, and what it must keep to go on after a long text."""

import tempfile

import torch

from qkv.models.llama import Llama, LlamaConfig

TOKENS = 2_000
SIZES = {"vocabulary": 100, "layers": 2, "heads": 8, "kv_heads": 2, "head_dim": 16, "width": 128, "feedforward": 256}
PATTERNS = {
    "Llama": {"pattern": "causal()"},
    "Mistral: a window": {"pattern": "sliding_window(256)"},
    "StreamingLLM: and the first tokens": {"pattern": "sliding_window(256) | causal() & prefix(4)"},
    "GPT-OSS: windows by turns, and sinks": {"pattern": ("sliding_window(256)", "causal()"), "sinks": True},
}

text = torch.randint(100, (1, TOKENS), generator=torch.Generator().manual_seed(0))

print(f"{'':38}{'model_type':12}{'kept':>10}   one pass and chunks")
for name, choice in PATTERNS.items():
    torch.manual_seed(0)
    config = LlamaConfig(positions=TOKENS, **SIZES, **choice)
    with tempfile.TemporaryDirectory() as folder:  # what transformers reads, where it has such a model
        Llama(config).save_pretrained(folder)
        model = Llama.from_pretrained(folder)
    state = model.initial_state(1, TOKENS)
    with torch.no_grad():
        whole = model(text).logits
        parts = [model(chunk, state=state).logits for chunk in text.split([1_000, 850, *[1] * 150], 1)]
    apart = float((torch.cat(parts, 1) - whole).abs().max() / whole.abs().max())
    kind = config.to_fields()["model_type"]
    print(f"{name:38}{kind:12}{state.nbytes / 1e3:7.0f} kB   differ by {apart:.0e} of the largest logit")
