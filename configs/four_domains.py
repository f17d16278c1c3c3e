"""Four domains, both routes, on a laptop CPU: what quickstart shows, with four experts.

    python -m opd_jax.main --config=configs/four_domains.py --workdir=runs/four_domains

The merged student starts with half of what each expert learnt, as in quickstart;
`configs/four_domains.py:base` starts it from the base alone.
"""

from ml_collections import ConfigDict

from configs import recipe
from opd_jax.config import one_of

BASE_TARGET = 0.45
# Four teachers ask more of a student of 103k parameters than two.
BATCH = {
    "prompts": {"arithmetic": 8, "countdown": 3, "logic": 2, "program": 4},
    "learning_rate": 8e-4,
}
MERGING = {"vectors": 0.5, "steps": 300}


def get_config(start: str = "experts") -> ConfigDict:
    """Four experts, one merge, beside joint GRPO on all four; `start` as for quickstart."""
    one_of("start", start, ("experts", "base"))
    merging = MERGING if start == "experts" else {}
    return recipe.comparison(
        "four_domains", tuple(recipe.LEVELS), base_target=BASE_TARGET, **BATCH, **merging
    )
