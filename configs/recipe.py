"""The miniature's recipe, shared by quickstart, four_domains and their sweeps.

Experts and joint have the same optimizer, the same sampling, the same evaluation and the same stop
rule; only their domains differ. What is tuned is tuned for both (see experiments/LOG.md).
"""

from collections.abc import Mapping

from ml_collections import ConfigDict

from configs import base

NEW_TOKENS = 10
# The same plateau rule for every expert and for joint.
STOP = {"patience": 5, "min_delta": 0.005, "select": "best"}


def pretrain(domains: Mapping[str, float], *, steps: int, target: float) -> ConfigDict:
    """The partly competent base model that all routes start from.

    It stops at a given accuracy, not after a given time: when arithmetic is learnt differs by
    hundreds of updates between seeds.
    """
    return base.stage(
        "sft",
        init="scratch",
        domains=domains,
        prompts=128,
        steps=steps,
        sampling={"samples": 1, "max_new_tokens": NEW_TOKENS},
        # No decay: a base that is still noisy leaves reinforcement learning something to sharpen.
        optimizer={"learning_rate": 4e-3, "warmup_steps": 50},
        stop={"select": "last", "target": target},
    )


def grpo(domains: Mapping[str, float], *, steps: int, init: str = "stage:base") -> ConfigDict:
    """An expert (one domain) or joint (all of them)."""
    return base.stage(
        "grpo",
        init=init,
        domains=domains,
        prompts=32,
        steps=steps,
        sampling={"samples": 8, "max_new_tokens": NEW_TOKENS},
        optimizer={"learning_rate": 4e-4},
        stop=STOP,
    )


def merge(
    teachers: Mapping[str, str], weights: Mapping[str, float], *, prompts: int, steps: int
) -> ConfigDict:
    """One student from several teachers, each on its own domain: exact reverse KL.

    Many small updates distil more per FLOP than few large ones (experiments/LOG.md, 2026-11-30).
    """
    return base.stage(
        "opd",
        init="stage:base",
        domains=weights,
        teachers=teachers,
        prompts=prompts,
        steps=steps,
        sampling={"samples": 2, "max_new_tokens": NEW_TOKENS},
        optimizer={
            "learning_rate": 7e-4,
            "schedule": "cosine",
            "warmup_steps": 4,
            "b2": 0.95,
        },
        stop={"select": "last"},
    )


def comparison(
    name: str,
    domains: Mapping[str, tuple[int, ...]],
    *,
    base_steps: int,
    base_target: float,
    grpo_steps: int,
    merge_steps: int,
    merge_prompts: Mapping[str, int],
) -> ConfigDict:
    """base -> one expert per domain -> merge, beside joint.

    Args:
      name: of the experiment.
      domains: name -> levels.
      base_steps: SFT updates of the base model, at most.
      base_target: its validation accuracy, mean over domains, at which they end.
      grpo_steps: budget of each expert; joint gets the sum, so that the stop rule ends it.
      merge_steps: OPD updates.
      merge_prompts: of each domain in an OPD batch.
    """
    even = {domain: 1 / len(domains) for domain in domains}
    prompts = sum(merge_prompts.values())
    experts = {f"expert_{domain}": grpo({domain: 1.0}, steps=grpo_steps) for domain in domains}
    stages = {
        "base": pretrain(even, steps=base_steps, target=base_target),
        **experts,
        "merge": merge(
            {d: f"stage:expert_{d}" for d in domains},
            {d: merge_prompts[d] / prompts for d in domains},
            prompts=prompts,
            steps=merge_steps,
        ),
        "joint": grpo(even, steps=grpo_steps * len(domains)),
    }
    return base.experiment(
        name,
        domains={
            domain: {"source": domain, "levels": levels} for domain, levels in domains.items()
        },
        plan=tuple(stages),
        stages=stages,
        routes={"divide_and_merge": (*experts, "merge"), "joint": ("joint",)},
        baseline="base",
        prompt_buckets=(20,),
        evaluation={"every": 10, "validation_problems": 256, "test_problems": 512, "batch": 256},
        checkpoint={"every": 1000},
    )
