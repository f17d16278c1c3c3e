"""Four domains, both routes, on a laptop CPU: what quickstart shows, with four experts.

python -m opd_jax.main --config=configs/four_domains.py --workdir=runs/four_domains
"""

from ml_collections import ConfigDict

from configs import recipe


def get_config() -> ConfigDict:
    """Four experts, one merge, beside joint GRPO on all four."""
    return recipe.comparison(
        "four_domains",
        {
            "arithmetic": (1, 2),
            "countdown": (1, 2),
            "logic": (1, 2),
            "program": (1,),
        },
        base_steps=2000,
        base_target=0.45,
        grpo_steps=200,
        merge_steps=400,
        merge_prompts={"arithmetic": 5, "countdown": 3, "logic": 4, "program": 4},
    )
