"""Feature maps with parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qkv.linear.features_fixed import widened


class HedgehogFeatures(nn.Module):
    """Hedgehog: phi(x) = softmax over the 2 D entries of [2y, -2y], y = W x + c with W and c learned for each head.

    W begins as the identity and c as 0. One softmax runs over the concatenation, as in flash-linear-attention, not one
    over each half. It is meant to be trained to imitate the weights of softmax attention; at its start it hardly does.

    Input (..., heads, L, D), with heads 1 shared by all; output (..., heads, L, 2 D), positive, float32 for 16 bits.
    Give q and k maps of their own by applying them first and passing feature_map=None.

    Source: Zhang, Bhatia, Kumbong, Ré, "The Hedgehog & the Porcupine" (2024).
    """

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.weight = nn.Parameter(torch.eye(head_dim).repeat(heads, 1, 1))  # (heads, D, D): out, in
        self.bias = nn.Parameter(torch.zeros(heads, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        x = widened(x)
        weight, bias = (parameter.to(x.device, x.dtype) for parameter in (self.weight, self.bias))
        return mirrored_softmax(x @ weight.mT + bias[:, None])

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        heads, head_dim = self.bias.shape
        return f"heads={heads}, head_dim={head_dim}"


def mirrored_softmax(y: Tensor) -> Tensor:
    """Softmax over the entries of [2y, -2y]: Hedgehog's features after the linear map, or at its identity start."""
    y = 2 * widened(y)
    return torch.cat([y, -y], dim=-1).softmax(dim=-1)
