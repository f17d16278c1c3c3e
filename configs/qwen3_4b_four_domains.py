"""Qwen3-4B-Base on four domains, both routes: four GRPO experts merged by OPD, beside joint GRPO.

    python -m tools.aot --config=configs/qwen3_4b_four_domains.py --topology=v6e:8x8
    python -m opd_jax.main --config=configs/qwen3_4b_four_domains.py --workdir=gs://BUCKET/four

For a v6e-64. Needs, in ~/.cache/opd_jax/assets or in the folder after a colon: `Qwen3-4B-Base`,
`MATH`, `mbpp`, `humaneval`; the other two domains come from reasoning-gym.
Not compiled yet (docs/tpu_pods.md says how), and not run.
"""

from ml_collections import ConfigDict

from configs import qwen3

DOMAINS = ("math", "code", "logic", "countdown")


def get_config(assets: str = qwen3.ASSETS) -> ConfigDict:
    """Four experts -> merge; joint."""
    model = qwen3.folder(assets, "Qwen3-4B-Base")
    experts = {f"expert_{domain}": qwen3.grpo(model, {domain: 1.0}) for domain in DOMAINS}
    stages = {
        **experts,
        "merge": qwen3.opd(model, {domain: f"stage:expert_{domain}" for domain in DOMAINS}),
        "joint": qwen3.grpo(model, qwen3.equal(DOMAINS), steps=len(DOMAINS) * qwen3.STEPS),
    }
    return qwen3.experiment(
        "qwen3_4b_four_domains",
        assets,
        model,
        DOMAINS,
        stages=stages,
        routes={"divide_and_merge": (*experts, "merge"), "joint": ("joint",)},
        mesh={"data": 1, "fsdp": 16, "tensor": 4},
    )
