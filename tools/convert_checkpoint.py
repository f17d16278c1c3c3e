"""Imports a Hugging Face folder, exports it again, and says whether anything was lost.

    python -m tools.convert_checkpoint --hf_dir=IN --out=OUT --check

writes OUT with every tensor in the dtype that IN stores it in (--dtype chooses another), with IN's
config and tokenizer. --check compares OUT with IN bit by bit, and, where torch and transformers are
installed (the extra `convert`), the logits of both with those of transformers. The exit status is 1
if bits differ, or logits by more than --tolerance.
"""

import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from etils import epath

from opd_jax import scoring
from opd_jax.core import sharding
from opd_jax.models import hf, hf_files, transformer
from opd_jax.models.config import ModelConfig

ROWS, COLUMNS = 2, 64  # Of the random tokens whose logits are compared.


def convert(
    hf_dir: epath.PathLike,
    out: epath.PathLike,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Imports a folder and writes it again.

    Args:
      hf_dir: a Hugging Face folder of a supported architecture.
      out: a new or empty folder.
      dtype: stored dtype; None: each tensor's own.
      max_shard_bytes: see `hf.save_params`.

    Raises:
      ValueError: see `hf.read_config`, `hf.load_params` and `hf.save_params`.
    """
    config = hf.read_config(hf_dir)
    params = hf.load_params(hf_dir, config)
    hf.save_params(
        params, config, out, source_dir=hf_dir, dtype=dtype, max_shard_bytes=max_shard_bytes
    )


def differing_tensors(a: epath.PathLike, b: epath.PathLike, config: ModelConfig) -> list[str]:
    """One line for each tensor that is not the same to the bit in two folders.

    A tied model's second copy of its table says nothing new, so it may be in one folder only.
    """
    a, b = epath.Path(a), epath.Path(b)
    left, right = hf_files.locate(a), hf_files.locate(b)
    spare = {"lm_head.weight"} if config.tie_embeddings else set()
    found = [f"{name}: in {a} only" for name in left.keys() - right.keys() - spare]
    found += [f"{name}: in {b} only" for name in right.keys() - left.keys() - spare]
    for name in sorted(left.keys() & right.keys()):
        with (
            hf_files.opened(a / left[name].file) as mine,
            hf_files.opened(b / right[name].file) as other,
        ):
            x, y = mine.get_tensor(name), other.get_tensor(name)
            same = (x.shape, x.dtype) == (y.shape, y.dtype)
            if not same or not np.array_equal(_bits(x), _bits(y)):
                found.append(f"{name}: {x.dtype}{list(x.shape)} and {y.dtype}{list(y.shape)}")
    return sorted(found)


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(f"u{x.itemsize}")


def our_logits(hf_dir: epath.PathLike, tokens_BT: np.ndarray) -> np.ndarray:
    """fp32 logits `[B, T, V]` of an imported folder."""
    config = hf.read_config(hf_dir)
    params = hf.load_params(hf_dir, config)
    rows, columns = tokens_BT.shape
    hidden_BTD = transformer.forward(
        params, config, jnp.asarray(tokens_BT), jnp.full(rows, columns, jnp.int32)
    )
    table_VD = transformer.unembedding(params)
    return np.asarray(scoring.logits(hidden_BTD, table_VD, softcap=config.final_softcap))


def their_logits(hf_dir: epath.PathLike, tokens_BT: np.ndarray) -> np.ndarray:
    """fp32 logits `[B, T, V]` by transformers; attention written out, as softcaps need it."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        hf_dir, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.tensor(tokens_BT.astype(np.int64)), use_cache=False).logits.numpy()


def has_transformers() -> bool:
    """Whether the packages of the extra `convert` are there."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))


def check(hf_dir: epath.PathLike, out: epath.PathLike, tolerance: float) -> bool:
    """Compares two folders, prints the verdict, and returns whether it is a good one."""
    config = hf.read_config(hf_dir)
    differing = differing_tensors(hf_dir, out, config)
    print(f"bits equal: {'no' if differing else 'yes'}")
    for line in differing:
        print(f"  {line}")
    same_model = hf.read_config(out) == config
    print(f"config equal: {'yes' if same_model else 'no'}")
    good = same_model and not differing
    columns = min(COLUMNS, config.max_length)
    shape, rng = (ROWS, columns), np.random.default_rng(0)
    tokens_BT = rng.integers(0, config.vocab_size, shape).astype(np.int32)
    if not has_transformers():
        print("largest |dlogit| against transformers: not measured, it is not installed")
        return good
    ours_BTV, theirs_BTV = our_logits(hf_dir, tokens_BT), their_logits(out, tokens_BT)
    largest = float(np.abs(ours_BTV - theirs_BTV).max())
    print(f"largest |dlogit| against transformers: {largest:.3g} (limit {tolerance:g})")
    return good and largest <= tolerance


def define_flags() -> None:
    """Not at import: tools share absl's one table of flags, and each has an `out`."""
    flags.DEFINE_string("hf_dir", None, "Hugging Face folder to import.")
    flags.DEFINE_string("out", None, "New folder to write.")
    flags.DEFINE_bool("check", False, "Compare the two folders; exit status 1 on a difference.")
    flags.DEFINE_float("tolerance", 1e-3, "Largest |difference| of logits to transformers.")
    stored = ["source", "float32", "bfloat16", "float16"]
    flags.DEFINE_enum("dtype", "source", stored, "How to store the weights.")
    flags.DEFINE_integer("max_shard_bytes", 5 * 10**9, "Larger files of weights are split.")
    flags.mark_flags_as_required(["hf_dir", "out"])


def main(argv: list[str]) -> None:
    """Converts, and compares if asked to."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; see --help")
    f = flags.FLAGS
    dtype = None if f.dtype == "source" else f.dtype
    with jax.set_mesh(sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1])):
        convert(f.hf_dir, f.out, dtype=dtype, max_shard_bytes=f.max_shard_bytes)
        print(f"wrote {f.out}")
        if f.check and not check(f.hf_dir, f.out, f.tolerance):
            sys.exit(1)


if __name__ == "__main__":
    define_flags()
    app.run(main)
