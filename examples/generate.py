"""A language model writes on qkv's attention: one text piece by piece, then two of different length as one batch."""

import torch

from qkv.models.smollm2 import SmolLM2

smol = SmolLM2.installed()
prompt = "A transformer reads a sentence by"

# The most probable token each time, as `qkv generate smollm2 "..."` does. A piece is there as soon as it is certain.
print(prompt, end="", flush=True)
writing = smol.write(prompt, 12)
for piece in writing:
    print(piece, end="", flush=True)
print(f"\n{writing.new_tokens} tokens after {writing.prompt_tokens}, kept in {writing.memory}\n")

# Prompts of different length, padded on the left: each gets what it would get alone, and leaves when it ends.
batch = smol.tokenizer.batch([prompt, "The capital of France is"], side="left")
ids = smol.llama.generate(batch.ids, 2, attention_mask=batch.attention_mask)
for row in ids:
    print(smol.tokenizer.decode(row))  # padding is a special token, which is left out

# Drawn instead: from the fewest tokens that together are 90 % probable, again the same for the same seed.
options = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1}
drawn = ["".join(smol.write(prompt, 6, generator=torch.Generator().manual_seed(1), **options)) for _ in range(2)]
print(f"\ndrawn with one seed, twice the same: {drawn[0] == drawn[1]}\n{prompt}{drawn[0]}")
