"""Four domains, both routes, on a laptop CPU: what quickstart shows, with four experts.

python -m opd_jax.main --config=configs/four_domains.py --workdir=runs/four_domains
"""

from ml_collections import ConfigDict

from configs import recipe

BASE_TARGET = 0.45


def get_config() -> ConfigDict:
    """Four experts, one merge, beside joint GRPO on all four."""
    return recipe.comparison("four_domains", tuple(recipe.LEVELS), base_target=BASE_TARGET)
