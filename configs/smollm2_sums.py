"""A real model gets better: SmolLM2-135M-Instruct adds, GRPO for 60 updates, then OPD of it anew.

    python -m tools.fetch_real_assets
    python -m opd_jax.main --config=configs/smollm2_sums.py --workdir=runs/smollm2_sums

The problems are reasoning-gym's `chain_sum` (extra `reasoning`) behind two solved ones: two numbers
of one digit in level 1, three in level 2. The fresh model is then distilled from that expert, on
the same problems. The assets are looked for in ~/.cache/opd_jax/assets, or in
the folder after a colon: `--config=configs/smollm2_sums.py:DIR`.
"""

from ml_collections import ConfigDict

from configs import base, smollm2_gsm8k

PROMPT_TOKENS, COMPLETION_TOKENS = 96, 8
DOMAIN = "chain_sum"
ASK = "Question: State the final answer to the following arithmetic problem: "
TEMPLATE = f"{ASK}9 - 4 =\nAnswer: 5\n\n{ASK}3 + 8 =\nAnswer: 11\n\nQuestion: {{prompt}}\nAnswer:"


def get_config(assets: str = smollm2_gsm8k.ASSETS) -> ConfigDict:
    """base model, measured -> GRPO expert; base model -> OPD from that expert.

    Args:
      assets: the folder that tools/fetch_real_assets.py has filled.

    Raises:
      FileNotFoundError: it has not.
    """
    model = smollm2_gsm8k.asset(assets, "SmolLM2-135M-Instruct")
    sampling = {"max_new_tokens": COMPLETION_TOKENS}
    domains = {DOMAIN: 1.0}
    common = {
        "steps": 60,
        "prompts": 8,
        "init": "stage:model",
        "domains": domains,
        "optimizer": {"learning_rate": 2e-5},
        "stop": {"select": "last"},
    }
    return base.experiment(
        "smollm2_sums",
        tokenizer=model,
        models={"student": {"hf": model}},
        domains={
            DOMAIN: {
                "source": f"reasoning:{DOMAIN}",
                "levels": (1, 2),
                "options": {
                    "all": {"min_digits": 1, "max_digits": 1},
                    "1": {"min_terms": 2, "max_terms": 2},
                    "2": {"min_terms": 3, "max_terms": 3},
                },
                "template": TEMPLATE,
                "near_duplicates": 0.0,  # All problems look alike.
            }
        },
        stop_strings=("\n",),
        stages={
            "model": base.stage(
                "sft", steps=0, init=f"hf:{model}", domains=domains, sampling=sampling
            ),
            "expert": base.stage("grpo", sampling={"samples": 8, **sampling}, **common),
            "distilled": base.stage(
                "opd",
                sampling={"samples": 1, **sampling},
                teachers={DOMAIN: "stage:expert"},
                **common,
            ),
        },
        baseline="model",
        routes={"distilled": ("expert", "distilled")},
        prompt_buckets=(PROMPT_TOKENS,),
        evaluation={"every": 60, "validation_problems": 32, "test_problems": 256, "batch": 64},
        checkpoint={"every": 60, "keep_newest": 1},
    )
