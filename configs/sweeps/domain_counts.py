"""Does divide-and-merge gain with the number of domains? The first 1, 2 and 4, beside joint GRPO.

    python -m opd_jax.sweep --sweep=configs/sweeps/domain_counts.py --workdir=runs/domain_counts

All points start from one base model of all four domains, and the experts of the first domains are
the same runs in every point. The merged student starts from the base, so that all it knows came by
distillation. A point is also a config of its own, e.g.
`python -m opd_jax.main --config=configs/sweeps/domain_counts.py:2`.
"""

from ml_collections import ConfigDict

from configs import four_domains, recipe
from opd_jax.config import one_of
from opd_jax.points import Point

COUNTS = (1, 2, 4)
FILE = "configs/sweeps/domain_counts.py"


def get_config(argument: str = "4,full") -> ConfigDict:
    """base -> an expert per domain -> merge, beside joint.

    Args:
      argument: the number of domains, and after a comma a key of recipe.SIZES: "2,smoke".
    """
    count, _, size = argument.partition(",")
    one_of("number of domains", count, map(str, COUNTS))
    domains = tuple(recipe.LEVELS)
    return recipe.comparison(
        "domain_counts",
        domains[: int(count)],
        base_domains=domains,
        base_target=four_domains.BASE_TARGET,
        s=recipe.size(size or "full"),
        **four_domains.BATCH,
    )


def get_sweep(size: str = "full") -> list[Point]:
    """1, 2 and 4 domains, over the seeds of the size."""
    seeds = recipe.size(size).seeds
    return [Point(f"domains_{n}", f"{FILE}:{n},{size}", {}, seed) for n in COUNTS for seed in seeds]
