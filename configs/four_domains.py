"""Four domains, both routes, on a laptop CPU: what quickstart shows, with four experts.

    python -m opd_jax.main --config=configs/four_domains.py --workdir=runs/four_domains

Over three seeds the merged student has 97 to 99% of its experts' accuracy, for 16 to 23% of their
FLOPs, and ends 0 to 2 points above joint GRPO, the cheaper route to what both reach (README).
"""

from ml_collections import ConfigDict

from configs import recipe

BASE_TARGET = 0.45
# Four teachers ask more of a student of 103k parameters than two.
MERGING = {
    "prompts": {"arithmetic": 8, "countdown": 3, "logic": 2, "program": 4},
    "learning_rate": 8e-4,
}


def get_config() -> ConfigDict:
    """Four experts, one merge, beside joint GRPO on all four."""
    return recipe.comparison(
        "four_domains", tuple(recipe.LEVELS), base_target=BASE_TARGET, **MERGING
    )
