"""The text that the demo reads, written for it, and how it is cut into windows. Knows nothing of models."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.errors import ShapeError, message

TEXT = """
Imagine a room full of people who all speak at once, and one of them needs an answer. She does not listen to
everybody with the same care. She holds a question in mind, looks at what each person seems to know, and leans
towards the few who match. What she hears in the end is a blend of voices, loud where the match was good and faint
where it was poor. That is attention. The question is called the query, what a person seems to know is called the
key, and what he then says is called the value.

Every word of a sentence plays all three parts. As a query it asks for what it lacks: a pronoun looks for the thing
that it stands for, a verb looks for its subject, an adjective looks for the noun that it paints. As a key it offers
itself to the questions of others. As a value it hands over what it means. The machine compares a query with a key
by multiplying their numbers pair by pair and adding the products, and the sum is large when both point in the same
direction. The sums are then made positive and scaled so that they add up to one. Each of them is now a share, and
the answer is the sum of all the values, every one weighed by its share.

Nothing in this recipe is fixed to a place. A word can fetch what it needs from its neighbour or from the far end of
the page in one step, where older machines had to carry a memory from word to word and lost a little on the way. The
price is paid in comparisons. Ten words make a hundred pairs, a thousand words make a million, and a whole book
makes more pairs than there are grains of sand on a small beach. When the text grows by two, the work grows by four.

So people began to leave pairs out. A reader of a long novel rarely needs the third page to understand the last one,
and most of what a word wants to know stands close by. A window lets every word look back over a short stretch and
no further. A stride lets it look at its neighbours and then at every hundredth word behind them, as a traveller who
studies the street in front of him also counts the towers on the horizon. A few chosen words may see everything and
be seen by everybody, like a notice board in the middle of the village. Random bridges join places that would
otherwise be strangers. Each of these shapes asks the same question, and each of them costs much less.

Leaving out is only honest when you know what was left out. If the shape says that a pair does not exist, then
nothing of the hidden word may reach the answer, and if the shape says that it does, then its share must be exactly
what the full recipe would have given it. A program that skips work must still be able to prove that the numbers are
right, and the best proof is a small one: take six words, write every product down, add them by hand, and compare.
""".strip().replace("\n\n", "\n")


def shifted_windows(ids: Tensor, *, size: int, count: int) -> Tensor:
    """`count` windows of `size` tokens from a text read round and round, each a little later: (L,) to (count, size)."""
    if ids.ndim != 1 or ids.shape[0] < size:
        seen = f"got {tuple(ids.shape)}"
        raise ShapeError(
            message(f"`ids` must be one text of at least {size} tokens", seen, "use a longer text or smaller windows")
        )
    starts = torch.arange(count) * max(1, ids.shape[0] // count)
    return ids[(starts[:, None] + torch.arange(size)) % ids.shape[0]]
