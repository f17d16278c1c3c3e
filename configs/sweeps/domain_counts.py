"""Does divide-and-merge gain with the number of domains? The first 1, 2 and 4, beside joint GRPO.

    python -m opd_jax.sweep --sweep=configs/sweeps/domain_counts.py --workdir=runs/domain_counts

All points start from one base model of all four domains, and the experts of the first domains are
the same runs in every point. A point is also a config of its own, e.g.
`python -m opd_jax.main --config=configs/sweeps/domain_counts.py:2`.
"""

from ml_collections import ConfigDict

from configs.sweeps import recipe
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
    s, domains = recipe.size(size or "full"), recipe.DOMAINS[: int(count)]
    experts = {domain: f"expert_{domain}" for domain in domains}
    stages = {"base": recipe.sft(s, recipe.DOMAINS)}
    stages |= {expert: recipe.grpo(s, (domain,)) for domain, expert in experts.items()}
    stages["merge"] = recipe.opd(s, {domain: f"stage:{e}" for domain, e in experts.items()})
    stages["joint"] = recipe.grpo(s, domains)
    return recipe.experiment(
        "domain_counts",
        s,
        recipe.DOMAINS,
        stages,
        routes={"divide_and_merge": (*experts.values(), "merge"), "joint": ("joint",)},
    )


def get_sweep(size: str = "full") -> list[Point]:
    """1, 2 and 4 domains, over the seeds of the size."""
    seeds = recipe.size(size).seeds
    return [Point(f"domains_{n}", f"{FILE}:{n},{size}", {}, seed) for n in COUNTS for seed in seeds]
