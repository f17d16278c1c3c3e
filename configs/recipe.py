"""The miniature's recipe, shared by quickstart, four_domains and the sweeps.

Experts and joint have the same optimizer, the same sampling, the same evaluation and the same stop
rule; only their domains differ. What is tuned is tuned for both (see experiments/LOG.md).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from configs import base
from opd_jax.config import one_of

NEW_TOKENS = 10
# The domains in the order in which sweeps add them, and the levels that a 103k-parameter model can
# learn in minutes.
LEVELS = {"arithmetic": (1, 2), "countdown": (1, 2), "logic": (1, 2), "program": (1,)}
# Prompts of each domain in the OPD batch of two: sums are what the student is slowest to take over.
MERGE_PROMPTS = {"arithmetic": 6, "countdown": 2}
# The same plateau rule for every expert and for joint.
STOP = {"patience": 5, "min_delta": 0.005, "select": "best"}


@dataclasses.dataclass(frozen=True)
class Size:
    """How much of everything: what differs between a real run and one that only has to end."""

    base_steps: int  # SFT updates of the base model, at most.
    base_prompts: int
    grpo_steps: int  # Budget per domain: joint gets the sum, so that the stop rule ends it.
    grpo_prompts: int
    early: int  # A GRPO step that still teaches, long before the last.
    merge_steps: int
    every: int  # Updates between evaluations.
    problems: int  # Held-out problems per split and domain.
    seeds: tuple[int, ...]


SIZES = {
    "full": Size(
        base_steps=1400, base_prompts=128, grpo_steps=300, grpo_prompts=32, early=40,
        merge_steps=800, every=20, problems=512, seeds=(0, 1, 2),
    ),
    # Its accuracies mean nothing.
    "smoke": Size(
        base_steps=2, base_prompts=8, grpo_steps=2, grpo_prompts=4, early=1,
        merge_steps=1, every=1, problems=4, seeds=(0,),
    ),
}  # fmt: skip


def size(name: str) -> Size:
    """The size of a name; raises ValueError if there is none."""
    one_of("size", name, SIZES)
    return SIZES[name]


def pretrain(s: Size, domains: Sequence[str], *, target: float, **changes: Any) -> ConfigDict:
    """A partly competent model from nothing, by the domains' own solutions.

    It stops at a given accuracy, not after a given time: when arithmetic is learnt differs by
    hundreds of updates between seeds.

    Args:
      s: the size.
      domains: what it is trained on, in equal shares.
      target: validation accuracy, mean over domains, at which it ends.
      **changes: other fields of the stage.
    """
    return base.stage(
        "sft",
        init="scratch",
        domains=equal(domains),
        prompts=s.base_prompts,
        steps=s.base_steps,
        sampling={"samples": 1, "max_new_tokens": NEW_TOKENS},
        # No decay: a base that is still noisy leaves reinforcement learning something to sharpen.
        optimizer={"learning_rate": 4e-3, "warmup_steps": 50},
        stop={"select": "last", "target": target},
        **changes,
    )


def grpo(s: Size, domains: Sequence[str], stop: Mapping[str, Any] = STOP) -> ConfigDict:
    """An expert (one domain) or joint (all of them), from the base."""
    return base.stage(
        "grpo",
        init="stage:base",
        domains=equal(domains),
        prompts=s.grpo_prompts,
        steps=s.grpo_steps * len(domains),
        sampling={"samples": 8, "max_new_tokens": NEW_TOKENS},
        optimizer={"learning_rate": 4e-4},
        stop=stop,
    )


def merge(
    s: Size,
    teachers: Mapping[str, str],
    prompts: Mapping[str, int] = MERGE_PROMPTS,
    learning_rate: float = 6e-4,
    steps: int = 0,
    **changes: Any,
) -> ConfigDict:
    """One student from the teacher of each domain: exact reverse KL.

    Many small updates distil more per FLOP than few large ones (experiments/LOG.md). `steps` and
    `changes` are fields of the stage; without `steps` it has those of the size.
    """
    prompts = {domain: prompts[domain] for domain in teachers}
    total = sum(prompts.values())
    return base.stage(
        "opd",
        init="stage:base",
        domains={domain: count / total for domain, count in prompts.items()},
        teachers=teachers,
        prompts=total,
        steps=steps or s.merge_steps,
        sampling={"samples": 2, "max_new_tokens": NEW_TOKENS},
        # Every completion counts alike: with token-mean the domain with longer answers would rule.
        aggregation="seq-mean-token-mean",
        optimizer={
            "learning_rate": learning_rate,
            "schedule": "cosine",
            "warmup_steps": 20,
            "b2": 0.98,
        },
        stop={"select": "last"},
        **changes,
    )


def comparison(
    name: str,
    domains: Sequence[str],
    *,
    base_target: float,
    base_domains: Sequence[str] = (),
    s: Size = SIZES["full"],
    vectors: float = 0.0,
    **merging: Any,
) -> ConfigDict:
    """base -> one expert per domain -> merge, beside joint.

    Args:
      name: of the experiment.
      domains: keys of LEVELS.
      base_target: see `pretrain`.
      base_domains: what the base model is trained on; by default the same domains.
      s: how much of everything.
      vectors: share of what each expert learnt that the merged student starts with, see
        config.Stage.task_vectors; 0: it starts from the base.
      **merging: other arguments of `merge`.
    """
    experts = {f"expert_{domain}": grpo(s, (domain,)) for domain in domains}
    base_domains = base_domains or domains
    stages = {
        "base": pretrain(s, base_domains, target=base_target),
        **experts,
        "merge": merge(
            s,
            {domain: f"stage:expert_{domain}" for domain in domains},
            task_vectors=dict.fromkeys(experts, vectors) if vectors else {},
            **merging,
        ),
        "joint": grpo(s, domains),
    }
    routes = {"divide_and_merge": (*experts, "merge"), "joint": ("joint",)}
    return experiment(name, s, base_domains, stages, routes=routes)


def experiment(
    name: str,
    s: Size,
    domains: Sequence[str],
    stages: Mapping[str, ConfigDict],
    **changes: Any,
) -> ConfigDict:
    """An experiment on some domains; `changes` as for `configs.base.experiment`."""
    return base.experiment(
        name,
        domains={domain: {"source": domain, "levels": LEVELS[domain]} for domain in domains},
        stages=stages,
        baseline="base",
        prompt_buckets=(20,),
        evaluation={
            "every": s.every,
            "validation_problems": s.problems,
            "test_problems": s.problems,
            "batch": min(s.problems, 256),
        },
        **({"checkpoint": {"every": 1000}} | changes),
    )


def equal(domains: Sequence[str]) -> dict[str, float]:
    """The same share of each batch for every domain."""
    return {domain: 1 / len(domains) for domain in domains}
