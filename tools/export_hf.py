"""Exports a trained student as a Hugging Face folder, and reads it back to be sure.

    python -m tools.export_hf --checkpoint=WORKDIR/STAGE --out=DIR

takes the weights that the finished stage selected; --step=N takes those of another checkpoint of
it. Tokenizer, chat template and generation config come from the folder that the student was
imported from (`models.*.hf` in the config), or from --source.

Of a LoRA stage the merged model is written; --peft writes its deltas alone, as a PEFT adapter whose
base is what the stage started from.
"""

import json

import jax
from absl import app, flags
from etils import epath

from opd_jax import teachers
from opd_jax.core import sharding, tree
from opd_jax.core.types import Params
from opd_jax.infra import checkpoint
from opd_jax.models import hf, lora, peft, transformer
from opd_jax.models.config import ModelConfig


def export(
    params: Params, config: ModelConfig, source_dir: epath.PathLike | None, out: epath.PathLike,
    dtype: str = "float32",
) -> None:  # fmt: skip
    """Writes a folder, imports it again and compares every bit.

    Args:
      params: fp32 parameters.
      config: their ModelConfig.
      source_dir: where tokenizer and config.json come from; None: a config.json alone is made.
      out: a new or empty folder.
      dtype: stored dtype.

    Raises:
      ValueError: see `hf.save_params`; or what was read back differs, leaf by leaf.
    """
    hf.save_params(params, config, out, source_dir=source_dir, dtype=dtype)
    stored = tree.cast(tree.cast(params, dtype), "float32")
    again = hf.load_params(out, hf.read_config(out))
    tree.check_same(stored, again, f"{out} is not what was written; do not use it", values=True)


def export_stage(
    stage_dir: epath.PathLike,
    out: epath.PathLike,
    *,
    step: int | None = None,
    source_dir: epath.PathLike | None = None,
    dtype: str = "float32",
) -> int:
    """Exports a stage's weights.

    Args:
      stage_dir: the stage's folder in a workdir.
      out: a new or empty folder.
      step: which checkpoint; None means the one that the finished stage selected.
      source_dir: see `export`; None means the folder that the config names, if it names one.
      dtype: stored dtype.

    Returns:
      The step that was exported.

    Raises:
      ValueError: the stage has not finished and no step is given; or see `export`.
      checkpoint.CheckpointError: there is no such checkpoint.
    """
    stage_dir = epath.Path(stage_dir)
    if source_dir is None:
        planned = json.loads((stage_dir.parent / "plan.json").read_text())["config"]
        source_dir = planned["models"][planned["stages"][stage_dir.name]["model"]]["hf"] or None
    restored, config = saved(stage_dir, step)
    params, config = whole(stage_dir, restored, config)
    export(params, config, source_dir, out, dtype)
    return restored.step


def export_adapter(
    stage_dir: epath.PathLike, out: epath.PathLike, *, step: int | None = None,
    base: str | None = None, dtype: str = "float32",
) -> int:  # fmt: skip
    """Writes the deltas of a LoRA stage as a PEFT adapter; arguments as `export_stage`.

    Args:
      base: folder or name of the base in the adapter's config; None means the stage's `init`.

    Raises:
      ValueError: the stage trained all weights.
    """
    restored, config = saved(epath.Path(stage_dir), step)
    if config.lora is None:
        raise ValueError(f"{stage_dir} has no LoRA deltas; leave --peft out")
    init = restored.meta["init"].removeprefix("hf:")
    peft.save_adapter(restored.state, config, out, init if base is None else base, dtype)
    return restored.step


def saved(stage_dir: epath.Path, step: int | None) -> tuple[checkpoint.Restored, ModelConfig]:
    """What a stage's checkpoint holds, by default the selected one, and its model."""
    step = teachers.read_result(stage_dir)["selected_step"] if step is None else step
    restored = checkpoint.load_params(stage_dir / "checkpoints", step)
    return restored, ModelConfig(**restored.meta["model"])


def whole(
    stage_dir: epath.Path, restored: checkpoint.Restored, config: ModelConfig
) -> tuple[Params, ModelConfig]:
    """All weights of a stage: of a LoRA stage its deltas are merged into what it started from."""
    if config.lora is None:
        return restored.state, config
    plain = config.replace(lora=None)
    source = teachers.parse(restored.meta["init"], "init")
    if source.kind == "hf":
        base = hf.load_params(source.name, plain)
    elif source.kind == "orbax":
        base = checkpoint.load_params(source.name, source.step).state
    else:
        below = stage_dir.parent / source.name
        base, _ = whole(below, *saved(below, source.step))
    one = sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1])
    with jax.set_mesh(one):
        layout = transformer.shardings(config, one)
        both = jax.tree.map(jax.device_put, lora.join(base, restored.state), layout)
        return lora.merge(both, config), plain


def define_flags() -> None:
    """Not at import: tools share absl's one table of flags, and each has an `out`."""
    flags.DEFINE_string("checkpoint", None, "A stage's folder: WORKDIR/STAGE.")
    flags.DEFINE_string("out", None, "New folder to write.")
    flags.DEFINE_integer("step", None, "Updates done; default: the step that the stage chose.")
    flags.DEFINE_string("source", None, "Hugging Face folder of the model before training.")
    stored = ["float32", "bfloat16", "float16"]
    flags.DEFINE_bool("peft", False, "Write a LoRA stage's deltas as a PEFT adapter.")
    flags.DEFINE_enum("dtype", "float32", stored, "How to store the weights.")
    flags.mark_flags_as_required(["checkpoint", "out"])


def main(argv: list[str]) -> None:
    """Exports as the flags say."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; see --help")
    f = flags.FLAGS
    if f.peft:
        step = export_adapter(f.checkpoint, f.out, step=f.step, base=f.source, dtype=f.dtype)
        print(f"{f.out}: deltas of step {step} of {f.checkpoint}")
        return
    step = export_stage(f.checkpoint, f.out, step=f.step, source_dir=f.source, dtype=f.dtype)
    print(f"{f.out}: step {step} of {f.checkpoint}, read back and compared")


if __name__ == "__main__":
    define_flags()
    app.run(main)
