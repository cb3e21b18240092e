"""Learn where to look: gradients reach a table of relative positions, ALiBi's slopes and the sinks."""

import torch

import qkv

torch.manual_seed(0)
HEADS, LENGTH, WIDTH, RADIUS = 2, 64, 16, 4

# The task: head 0 gives the token before, head 1 the token three before. Queries say nothing, so that only the table
# of a number a head and distance can solve it.
value = torch.randn(4, HEADS, LENGTH, WIDTH)
target = torch.stack([value[:, 0].roll(1, dims=1), value[:, 1].roll(3, dims=1)], dim=1)
nothing = torch.zeros(4, HEADS, LENGTH, 1)

table = torch.zeros(HEADS, 2 * RADIUS + 1, requires_grad=True)
optimiser = torch.optim.Adam([table], lr=0.3)
pattern = qkv.causal() & qkv.window(RADIUS - 1)
for step in range(31):
    out = qkv.attention(nothing, nothing, value, pattern=pattern, bias=qkv.relative(table))
    loss = (out - target)[:, :, RADIUS:].square().mean()
    if step % 10 == 0:
        print(f"step {step:>2}  loss {loss.item():.4f}")
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()

distance = table.detach()[:, : RADIUS + 1].argmax(dim=1) - RADIUS
print("head 0 looks at distance", distance[0].item(), "and head 1 at", distance[1].item())

# ALiBi and sinks have gradients too, here against finite differences in float64.
q, k, v = (torch.randn(1, HEADS, 5, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
slopes = torch.tensor(qkv.alibi_slopes(HEADS), dtype=torch.float64, requires_grad=True)
sinks = torch.randn(HEADS, dtype=torch.float64, requires_grad=True)


def call(q, k, v, slopes, sinks):
    return qkv.attention(q, k, v, pattern=qkv.causal(), bias=qkv.alibi(slopes), sinks=sinks)


print("gradients agree with finite differences:", torch.autograd.gradcheck(call, (q, k, v, slopes, sinks)))
