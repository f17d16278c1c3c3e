"""Every kind of stage in about a minute on a CPU: what the tests run. Its accuracies mean nothing.

python -m opd_jax.main --config=configs/smoke.py --workdir=runs/smoke
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    """sft -> two grpo experts -> opd merge, beside joint grpo; an sft on a teacher's rollouts."""
    a, p = "arithmetic", "program"
    both = {a: 0.5, p: 0.5}
    small = {
        "prompts": 8,
        "steps": 4,
        "sampling": {"samples": 4, "max_new_tokens": 10},
        "optimizer": {"learning_rate": 1e-3},
    }
    stages = {
        "base": base.stage("sft", init="scratch", domains=both, **(small | {"steps": 8})),
        "expert_a": base.stage("grpo", init="stage:base", domains={a: 1.0}, **small),
        "expert_p": base.stage("grpo", init="stage:base", domains={p: 1.0}, **small),
        "joint": base.stage("grpo", init="stage:base", domains=both, **small),
        "merge": base.stage(
            "opd",
            init="stage:base",
            domains=both,
            teachers={a: "stage:expert_a", p: "stage:expert_p"},
            **(small | {"sampling": {"samples": 1, "max_new_tokens": 10}}),
        ),
        "sampled": base.stage(
            "opd",
            init="stage:base",
            domains=both,
            teachers={a: "stage:expert_a", p: "stage:expert_p"},
            opd={"loss": "sampled"},
            **(small | {"sampling": {"samples": 2, "max_new_tokens": 10}}),
        ),
        "cold": base.stage(
            "sft",
            init="scratch",
            domains=both,
            teachers={a: "stage:expert_a", p: "stage:expert_p"},
            sft={"source": "teacher"},
            **(small | {"sampling": {"samples": 1, "max_new_tokens": 10}}),
        ),
    }
    return base.experiment(
        "smoke",
        domains={name: {"source": name, "levels": (1, 2)} for name in (a, p)},
        plan=tuple(stages),
        stages=stages,
        routes={"divide_and_merge": ("expert_a", "expert_p", "merge"), "joint": ("joint",)},
        baseline="base",
        prompt_buckets=(24,),
        evaluation={
            "every": 2,
            "validation_problems": 16,
            "test_problems": 16,
            "batch": 16,
        },
        checkpoint={"every": 1},
    )
