"""LoRA deltas as a PEFT adapter folder: adapter_config.json and adapter_model.safetensors."""

import json
import os

import jax.numpy as jnp
import numpy as np
from etils import epath
from safetensors.numpy import save_file

from opd_jax.core.types import Params
from opd_jax.models import hf, lora
from opd_jax.models.config import ModelConfig


def save_adapter(
    delta: Params, config: ModelConfig, out_dir: epath.PathLike, base_model: str,
    dtype: str = "float32",
) -> None:  # fmt: skip
    """Writes an adapter that `peft.PeftModel.from_pretrained(base, out_dir)` puts on its base.

    Args:
      delta: the deltas of `lora.split`.
      config: the model's, with its `lora`.
      out_dir: a new or empty folder on a local disk.
      base_model: folder or name of the base, as the adapter's config states it.
      dtype: stored dtype, "float32", "bfloat16" or "float16".

    Raises:
      FileExistsError: `out_dir` is not empty.
    """
    out_dir = epath.Path(out_dir)
    if out_dir.exists() and any(out_dir.iterdir()):
        raise FileExistsError(f"out_dir={out_dir} is not empty; choose a new folder")
    out_dir.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: np.ascontiguousarray(x.astype(jnp.dtype(dtype)))
        for name, x in _tensors(delta, config).items()
    }
    save_file(tensors, os.fspath(out_dir / "adapter_model.safetensors"), {"format": "pt"})
    (out_dir / "adapter_config.json").write_text(json.dumps(_config(config, base_model), indent=2))


def _tensors(delta: Params, config: ModelConfig) -> dict[str, np.ndarray]:
    """Every tensor of the file: A `[r, in]` and B `[out, r]` per layer and target."""
    found = {}
    for row in _rows(config):
        target = row.path[-1]
        out_letters, in_letters = row.file_axes
        a = hf.Row((), "lora_A", ("r", in_letters), f"{in_letters}r", row.when)
        b = hf.Row((), "lora_B", (out_letters, "r"), f"r{out_letters}", row.when)
        for n, name in enumerate(row.names(config)):
            for part, leaf in ((a, target + lora.A), (b, target + lora.B)):
                key = f"base_model.model.{name.removesuffix('weight')}{part.name}.weight"
                found[key] = part.to_file(np.asarray(delta["layers"][leaf][n]))
    return found


def _rows(config: ModelConfig) -> list[hf.Row]:
    return [row for row in hf.TABLE if row.path[-1] in config.lora.targets]


def _config(config: ModelConfig, base_model: str) -> dict[str, object]:
    modules = [row.name.split(".")[-2] for row in _rows(config)]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
