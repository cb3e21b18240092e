"""A small vision transformer whose patches see only their neighbours tells pictures of 8 by 8 pixels apart.

Attention over the 16 patches is local; the class token sees all of them.
"""

import torch

from qkv.models import ViTConfig, ViTForImageClassification

torch.manual_seed(0)
SHAPES = ("bar across", "bar down", "frame", "cross")


def pictures(count):
    """Noisy pictures (count, 1, 8, 8) of a shape somewhere, and which one it is (count,)."""
    pixels, kinds = 0.2 * torch.randn(count, 1, 8, 8), torch.randint(len(SHAPES), (count,))
    for picture, kind in zip(pixels[:, 0], kinds.tolist(), strict=True):
        top, left = torch.randint(4, (2,)).tolist()
        spot = picture[top : top + 5, left : left + 5]
        if kind in {0, 3}:
            spot[2] += 1
        if kind in {1, 3}:
            spot[:, 2] += 1
        if kind == 2:
            spot[[0, 4]] += 1
            spot[1:4, [0, 4]] += 1
    return pixels, kinds


config = ViTConfig(
    image=(8, 8), patch=(2, 2), channels=1, layers=2, heads=4, width=32, feedforward=64, attention="neighborhood",
    kernel=3, classes=SHAPES, spread=0.1,
)  # fmt: skip
model = ViTForImageClassification(config)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(150):
    pixels, kinds = pictures(64)
    loss = model(pixels, labels=kinds).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

model.eval()
pixels, kinds = pictures(500)
with torch.no_grad():
    right = (model(pixels).logits.argmax(1) == kinds).float().mean()
reach = config.reach((4, 4), layer=0)
print(f"{right:.0%} of new pictures are named; each patch sees {reach.count(16) // 16} of 16 patches")
