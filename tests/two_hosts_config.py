"""What tests/test_two_hosts.py runs in two processes: sft, grpo, opd of two teachers, sft of them.

Rewards have a term made of texts, and completions end at a text, because both are known to the host
of a row alone. 14 problems do not fill two evaluation batches of 8.
"""

import zlib

from ml_collections import ConfigDict

from configs import base
from opd_jax import domains
from opd_jax.domains.answers import Verifier


def checksum(answer: str, completion: str) -> bool:
    """Untrained models solve nothing; this gives GRPO something to follow."""
    return zlib.crc32(f"{answer}{completion}".encode()) % 2 == 0


def get_config() -> ConfigDict:
    a, p = "arithmetic", "program"
    domains.VERIFIERS |= dict.fromkeys((a, p), Verifier(checksum, check=len))
    both, teachers = {a: 0.5, p: 0.5}, {a: "stage:expert", p: "random"}
    small = {"prompts": 8, "steps": 4, "sampling": {"samples": 2, "max_new_tokens": 6}}
    one = small | {"sampling": {"samples": 1, "max_new_tokens": 6}}
    terms = {"format": r"^-?\d", "format_factor": 0.5, "overlong_buffer": 4}
    stages = {
        "base": base.stage("sft", init="scratch", domains=both, **(small | {"steps": 2})),
        "expert": base.stage("grpo", init="stage:base", domains=both, reward=terms, **small),
        "merge": base.stage("opd", init="stage:base", domains=both, teachers=teachers, **one),
        "cold": base.stage(
            "sft", init="scratch", domains=both, teachers=teachers,
            sft={"source": "teacher"}, **(one | {"steps": 2}),
        ),
    }  # fmt: skip
    return base.experiment(
        "two_hosts",
        domains={name: {"source": name, "levels": (1,)} for name in (a, p)},
        plan=tuple(stages),
        stages=stages,
        routes={"divide_and_merge": ("expert", "merge")},
        baseline="base",
        prompt_buckets=(24,),
        stop_strings=("7", "a", "e"),
        evaluation={"every": 2, "validation_problems": 14, "test_problems": 14, "batch": 8},
        checkpoint={"every": 1},
        mesh={"fsdp": 4, "tensor": 2},
    )
