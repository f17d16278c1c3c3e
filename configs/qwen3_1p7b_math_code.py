"""Qwen3-1.7B-Base on math and code, both routes: two GRPO experts merged by OPD, beside joint GRPO.

    python -m tools.aot --config=configs/qwen3_1p7b_math_code.py --topology=v5e:8x8
    python -m opd_jax.main --config=configs/qwen3_1p7b_math_code.py --workdir=gs://BUCKET/math_code

For a v5e-64. Needs, in ~/.cache/opd_jax/assets or in the folder after a colon
(`--config=configs/qwen3_1p7b_math_code.py:DIR`): `Qwen3-1.7B-Base`, `MATH`, `mbpp`, `humaneval`.
Compiled and seen to fit (docs/tpu_pods.md); not run.
"""

from ml_collections import ConfigDict

from configs import qwen3


def get_config(assets: str = qwen3.ASSETS) -> ConfigDict:
    """expert_math, expert_code -> merge; joint."""
    model = qwen3.folder(assets, "Qwen3-1.7B-Base")
    domains = ("math", "code")
    experts = {f"expert_{domain}": qwen3.grpo(model, {domain: 1.0}) for domain in domains}
    stages = {
        **experts,
        "merge": qwen3.opd(
            model,
            {domain: f"stage:expert_{domain}" for domain in domains},
            micro_batches=2,
        ),
        "joint": qwen3.grpo(model, qwen3.equal(domains), steps=2 * qwen3.STEPS),
    }
    return qwen3.experiment(
        "qwen3_1p7b_math_code",
        assets,
        model,
        domains,
        stages=stages,
        routes={"divide_and_merge": (*experts, "merge"), "joint": ("joint",)},
        mesh={"data": 1, "fsdp": 16, "tensor": 4},
    )
