"""Logic: `A>B;C>A:` -> `CAB`, or worked, `C>A;A>B=CAB`.

Clues compare items; the answer is the one order of all items, greatest first. Clues stand in any
order and either direction (`B<A`), and half of the puzzles have a clue more than needed. The level
is the number of items less two. A problem is its order: held-out orders are never answers in
training, whatever the clues.
"""

import itertools
import random
from collections.abc import Iterator

from opd_jax.domains.answers import EXACT, Domain, Draft

_ITEMS = "ABCDEFGH"
_WORDINGS = {1: 12, 2: 3, 3: 1}  # Puzzles per order, by level.


def generate(level: int) -> Iterator[Draft]:
    """Drafts of one level in a fixed pseudo-random order."""
    rng = random.Random(f"logic {level}")
    orders = list(itertools.permutations(_ITEMS, level + 2))
    for _ in range(_WORDINGS[level]):
        rng.shuffle(orders)
        for order in orders:
            yield _draft(order, rng)


def _draft(order: tuple[str, ...], rng: random.Random) -> Draft:
    chain = list(itertools.pairwise(order))
    clues = list(chain)
    if rng.random() < 0.5:
        implied = [pair for pair in itertools.combinations(order, 2) if pair not in chain]
        clues.append(rng.choice(implied))
    rng.shuffle(clues)
    written = [f"{a}>{b}" if rng.random() < 0.5 else f"{b}<{a}" for a, b in clues]
    answer = "".join(order)
    worked = ";".join(f"{a}>{b}" for a, b in chain) + f"={answer}"
    return Draft(answer, ";".join(written) + ":", answer, answer, worked)


DOMAIN = Domain(generate, EXACT, version="1.1.0")
