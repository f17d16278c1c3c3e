"""What the Qwen3 experiments on TPU pods share: folders, problems, and the papers' settings.

Hyper-parameters are those of arXiv 2604.13016 (GRPO: table 1; OPD: table 2; both: temperature 1, no
KL, token-mean, AdamW at 1e-6, one optimizer step per batch), but for the length of a completion:
their 7,168 tokens gave no more than 3,072 (section on depth).
"""

import os
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from configs import base

ASSETS = "~/.cache/opd_jax/assets"
PROMPT_TOKENS, COMPLETION_TOKENS = 1024, 3072
STEPS = 300
# "<|endoftext|>", which ends a base model's text, and "<|im_end|>", which ends an answer.
STOPS = ((151_643, 151_645),)

BOXED = "{prompt}\nPlease reason step by step, and put your final answer within \\boxed{}."
CODE = "{prompt}\nWrite the function in one ```python block."


def folder(assets: str, *parts: str) -> str:
    """A path below the folder of assets; nothing need be there until the experiment runs."""
    return os.path.join(os.path.abspath(os.path.expanduser(assets)), *parts)


def problems(assets: str) -> dict[str, dict[str, Any]]:
    """Domains by name: fields of DomainSettings."""
    return {
        "math": {
            "source": "math",
            "path": folder(assets, "MATH"),
            "levels": (1, 2, 3, 4, 5),
            "template": BOXED,
        },
        "code": {
            "source": "mbpp",
            "path": folder(assets, "mbpp", "sanitized-mbpp.json"),
            "test_source": "humaneval",
            "test_path": folder(assets, "humaneval", "HumanEval.jsonl.gz"),
            "levels": (1,),
            "template": CODE,
        },
        "logic": {"source": "reasoning:knights_knaves", "levels": (1, 2, 3), "size": 6000},
        "countdown": {"source": "reasoning:countdown", "levels": (1, 2, 3), "size": 6000},
    }


def grpo(model: str, domains: Mapping[str, float], **changes: Any) -> ConfigDict:
    """Table 1: an expert, or joint on several domains; 64 prompts of 8 samples."""
    settings = {
        "prompts": 64,
        "steps": STEPS,
        "sampling": {"samples": 8, "max_new_tokens": COMPLETION_TOKENS},
        "clip_high": 0.2,
        "micro_batches": 4,
        "optimizer": {"learning_rate": 1e-6},
        "stop": {"patience": 5},
    }
    return base.stage("grpo", init=f"hf:{model}", domains=domains, **(settings | changes))


def opd(model: str, teachers: Mapping[str, str], **changes: Any) -> ConfigDict:
    """Table 2: 64 prompts of 4 samples, in equal shares; reverse KL on the student's top 16."""
    settings = {
        "prompts": 64,
        "steps": STEPS,
        "sampling": {"samples": 4, "max_new_tokens": COMPLETION_TOKENS},
        "optimizer": {"learning_rate": 1e-6},
        "opd": {"loss": "top_k", "top_k": 16, "top_k_form": "renormalised"},
        "stop": {"select": "last"},
    }
    return base.stage(
        "opd",
        init=f"hf:{model}",
        domains=equal(teachers),
        teachers=teachers,
        **(settings | changes),
    )


def equal(domains: Mapping[str, Any] | tuple[str, ...]) -> dict[str, float]:
    """The same share of each batch for every domain."""
    return {domain: 1 / len(domains) for domain in domains}


def experiment(
    name: str, assets: str, model: str, domains: tuple[str, ...], **changes: Any
) -> ConfigDict:
    """An experiment of a base model on some of `problems`, in bfloat16, for a pod."""
    known = problems(assets)
    settings = {
        "tokenizer": model,
        "chat": {"template": "own", "thinking": "off"},
        "prompt_buckets": (PROMPT_TOKENS,),
        "prompt_overflow": "drop",
        "evaluation": {
            "every": 20,
            "validation_problems": 256,
            "test_problems": 512,
            "temperature": 0.7,
            "top_p": 0.95,
            "batch": 256,
        },
        "checkpoint": {"every": 20},
        "runtime": {"platform": "tpu", "multihost": True},
    }
    return base.experiment(
        name,
        models={"student": {"hf": model, "dtype": "bfloat16", "remat": "full"}},
        domains={domain: known[domain] for domain in domains},
        **(settings | changes),
    )
