"""A real model on real problems: SmolLM2-135M-Instruct, GSM8K, two updates of GRPO and two of OPD.

    python -m tools.fetch_real_assets
    python -m opd_jax.main --config=configs/smollm2_gsm8k.py --workdir=runs/smollm2

It carries a published checkpoint from import to report on a CPU. Two updates teach nothing, and
accuracies over eight problems mean nothing. The assets are looked for in ~/.cache/opd_jax/assets,
or in the folder after a colon: `--config=configs/smollm2_gsm8k.py:DIR`.
Each stage leaves up to two checkpoints of weights and Adam's moments, 1.6 GB apiece.
"""

import os

from ml_collections import ConfigDict

from configs import base

ASSETS = "~/.cache/opd_jax/assets"
PROMPT_TOKENS, COMPLETION_TOKENS = 128, 64


def get_config(assets: str = ASSETS) -> ConfigDict:
    """base model -> GRPO expert; base model -> OPD from that expert.

    Args:
      assets: the folder that tools/fetch_real_assets.py has filled.

    Raises:
      FileNotFoundError: it has not.
    """
    model = asset(assets, "SmolLM2-135M-Instruct")
    problems = asset(assets, "gsm8k/problems.jsonl")
    common = {
        "steps": 2,
        "prompts": 4,
        "sampling": {"samples": 4, "max_new_tokens": COMPLETION_TOKENS, "temperature": 0.7},
        "micro_batches": 4,
        "optimizer": {"learning_rate": 1e-5},
        "stop": {"select": "last"},
    }
    # The model is seldom right: all of two updates' completions may be wrong. But some run into the
    # limit, and those that end in time earn more.
    reward = {"overlong_buffer": COMPLETION_TOKENS // 2}
    domain = {"gsm8k": 1.0}
    return base.experiment(
        "smollm2_gsm8k",
        tokenizer=model,
        models={"student": {"hf": model}},
        # Longer solutions do not fit into the completion; a level is a number of calculations.
        domains={"gsm8k": {"source": f"jsonl:{problems}", "levels": (1, 2, 3)}},
        stages={
            "expert": base.stage(
                "grpo", init=f"hf:{model}", domains=domain, reward=reward, **common
            ),
            "merge": base.stage(
                "opd",
                init=f"hf:{model}",
                domains=domain,
                teachers={"gsm8k": "stage:expert"},
                **common,
            ),
        },
        routes={"divide_and_merge": ("expert", "merge")},
        prompt_buckets=(PROMPT_TOKENS,),
        prompt_overflow="drop",
        evaluation={
            "every": 2,
            "validation_problems": 8,
            "test_problems": 8,
            "temperature": 0.7,
            "batch": 8,
        },
        checkpoint={"every": 2, "keep_newest": 1},
    )


def asset(assets: str, name: str) -> str:
    """The path of something that tools/fetch_real_assets.py leaves in its folder.

    Raises:
      FileNotFoundError: it is not there.
    """
    folder = os.path.abspath(os.path.expanduser(assets))
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"{path} is not there; run: python -m tools.fetch_real_assets --out={folder}"
        )
    return path
