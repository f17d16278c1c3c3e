"""Hugging Face folders in and out, for the Llama family, through one mapping table.

A folder holds `config.json` and either `model.safetensors` or shards with
`model.safetensors.index.json`. Its rotary layout is half-split like ours, so query and key rows are
never permuted. What cannot be represented here is refused by name, never ignored.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from opd_jax.core import tree
from opd_jax.core.types import Params
from opd_jax.models import hf_config
from opd_jax.models.config import ModelConfig
from opd_jax.models.hf_config import read_config as read_config

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json",
          "added_tokens.json", "merges.txt", "tokenizer.model", "chat_template.jinja",
          "generation_config.json")  # fmt: skip

_FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the mapping: a leaf of the tree, and the tensors of the file it is made of.

    Axes are the letters of the legend in core/types.py. A file axis of two letters holds both, the
    first one slowest: with H=2, E=3, row 4 of "HE" is head 1, dimension 1.
    """

    path: tuple[str, ...]
    name: str  # "{n}" is the layer's number; such leaves get the layer axis in front.
    file_axes: tuple[str, ...]
    tree_axes: str

    def names(self, config: ModelConfig) -> list[str]:
        """The tensors of the leaf, layer by layer."""
        layers = config.num_layers if self.path[0] == "layers" else 1
        return [self.name.format(n=n) for n in range(layers)]

    def file_shape(self, config: ModelConfig) -> tuple[int, ...]:
        """Shape of each of its tensors in the file."""
        size = _sizes(config)
        return tuple(math.prod(size[letter] for letter in axis) for axis in self.file_axes)

    def leaf_shape(self, config: ModelConfig) -> tuple[int, ...]:
        """Shape of the leaf in the tree."""
        shape = tuple(_sizes(config)[letter] for letter in self.tree_axes)
        return (config.num_layers, *shape) if self.path[0] == "layers" else shape

    def to_file(self, x: np.ndarray) -> np.ndarray:
        """One layer of the leaf as the file has it."""
        letters = "".join(self.file_axes)
        split = dict(zip(self.tree_axes, x.shape, strict=True))
        shape = [math.prod(split[letter] for letter in axis) for axis in self.file_axes]
        return x.transpose([self.tree_axes.index(c) for c in letters]).reshape(shape)

    def read(self, file: Any, name: str, index: tuple[slice, ...], config: ModelConfig):
        """The part of a tensor that `index` cuts from one layer of the leaf, in the file's dtype.

        Of an axis that holds two letters the file is cut along the first; so a shard of the heads,
        or of the width, is all that is read of a tensor.
        """
        cut, size = dict(zip(self.tree_axes, index, strict=True)), _sizes(config)
        box, shape, rest = [], [], {}
        for first, *others in self.file_axes:
            start, stop, _ = cut[first].indices(size[first])
            inner = math.prod(size[letter] for letter in others)
            box.append(slice(start * inner, stop * inner))
            shape += [stop - start, *(size[letter] for letter in others)]
            rest |= {letter: cut[letter] for letter in others}
        letters = "".join(self.file_axes)
        block = file.get_slice(name)[tuple(box)].reshape(shape)
        block = block.transpose([letters.index(c) for c in self.tree_axes])
        return block[tuple(rest.get(c, slice(None)) for c in self.tree_axes)]


def _row(path: str, name: str, file_axes: str, tree_axes: str) -> Row:
    return Row(tuple(path.split(".")), name, tuple(file_axes.split()), tree_axes)


_ATTENTION, _MLP = "model.layers.{n}.self_attn.", "model.layers.{n}.mlp."

TABLE = (
    _row("embedding", "model.embed_tokens.weight", "V D", "VD"),
    _row("final_norm", "model.norm.weight", "D", "D"),
    _row("head", "lm_head.weight", "V D", "VD"),
    _row("layers.attn_norm", "model.layers.{n}.input_layernorm.weight", "D", "D"),
    _row("layers.q", _ATTENTION + "q_proj.weight", "HE D", "DHE"),
    _row("layers.k", _ATTENTION + "k_proj.weight", "KE D", "DKE"),
    _row("layers.v", _ATTENTION + "v_proj.weight", "KE D", "DKE"),
    _row("layers.o", _ATTENTION + "o_proj.weight", "D HE", "HED"),
    _row("layers.mlp_norm", "model.layers.{n}.post_attention_layernorm.weight", "D", "D"),
    _row("layers.gate", _MLP + "gate_proj.weight", "F D", "DF"),
    _row("layers.up", _MLP + "up_proj.weight", "F D", "DF"),
    _row("layers.down", _MLP + "down_proj.weight", "D F", "FD"),
)
_EMBEDDING, _HEAD = TABLE[0].name, TABLE[2].name


def _sizes(config: ModelConfig) -> dict[str, int]:
    return {"V": config.vocab_size, "D": config.embed_dim, "H": config.num_heads,
            "K": config.num_kv_heads, "E": config.head_dim, "F": config.mlp_dim}  # fmt: skip


def _rows(config: ModelConfig) -> list[Row]:
    return [row for row in TABLE if not (config.tie_embeddings and row.path == ("head",))]


def _file_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the file and its shape there, in the order of the table."""
    return {name: row.file_shape(config) for row in _rows(config) for name in row.names(config)}


# --- import ------------------------------------------------------------------------------------


def load_params(
    hf_dir: epath.PathLike, config: ModelConfig, shardings: Params | None = None
) -> Params:
    """The parameters in a folder's safetensors, fp32, read piece by piece onto their layout.

    Everything is checked against `config` before any device memory is used. The host holds at
    most one leaf at a time; of a sharded leaf each host reads its own shards only.

    Args:
      hf_dir: a folder on a local disk with `model.safetensors`, or shards and their index.
      config: what `read_config` gives. Replacing its `tie_embeddings` by True ties a model whose
        file has no head.
      shardings: a tree of NamedShardings like the parameters; None means the default device.

    Returns:
      `{"embedding", "final_norm", "layers": {...}}`, and "head" if the embeddings are not tied.

    Raises:
      FileNotFoundError: the folder has no safetensors.
      ValueError: files, index, tensors or shapes are not as expected; every difference is listed.
    """
    hf_dir = epath.Path(hf_dir)
    located = _locate(hf_dir)
    if shardings is not None:
        odd = tree.leaves_by_path(_abstract(config)).keys() ^ tree.leaves_by_path(shardings).keys()
        if odd:
            raise ValueError(f"shardings: not the tree of the parameters, see {sorted(odd)}")
    with contextlib.ExitStack() as stack:
        files = {f: stack.enter_context(_open(f)) for f in sorted(set(located.values()))}
        handles = {name: files[file] for name, file in located.items()}
        _check_tensors(hf_dir, handles, config)
        params: Params = {"layers": {}}
        for row in _rows(config):
            *parents, leaf = row.path
            layout = shardings
            for key in row.path:
                layout = None if layout is None else layout[key]
            (params["layers"] if parents else params)[leaf] = _leaf(row, handles, config, layout)
        return params


def _leaf(
    row: Row, handles: Mapping[str, Any], config: ModelConfig, layout: jax.sharding.Sharding | None
) -> jax.Array:
    names, shape = row.names(config), row.leaf_shape(config)

    def cut(index: tuple[slice, ...]) -> np.ndarray:
        if row.path[0] != "layers":
            block = row.read(handles[names[0]], names[0], index, config)
            return np.ascontiguousarray(block, dtype=np.float32)
        chosen = names[index[0]]
        extent = [len(range(*s.indices(size))) for s, size in zip(index, shape, strict=True)]
        block = np.empty(extent, np.float32)
        for i, name in enumerate(chosen):
            block[i] = row.read(handles[name], name, index[1:], config)
        return block

    if layout is None:
        return jnp.asarray(cut((slice(None),) * len(shape)))
    return jax.make_array_from_callback(shape, layout, cut)


def _open(file: str) -> Any:
    try:
        return safe_open(file, framework="np")
    except SafetensorError as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error}); get it again") from error


def _locate(hf_dir: epath.Path) -> dict[str, str]:
    """The file of every tensor, the index checked against what the files hold."""
    held: dict[str, list[str]] = {}
    for file in sorted(hf_dir.glob("*.safetensors")):
        with _open(os.fspath(file)) as opened:
            for name in opened.keys():  # noqa: SIM118 (a handle is not a mapping)
                held.setdefault(name, []).append(file.name)
    if (hf_dir / INDEX).exists():
        listed: dict[str, str] = json.loads((hf_dir / INDEX).read_text())["weight_map"]
    elif (hf_dir / WEIGHTS).exists():
        listed = {name: WEIGHTS for name, files in held.items() if WEIGHTS in files}
    else:
        raise FileNotFoundError(
            f"{hf_dir} has neither {WEIGHTS} nor {INDEX}; other formats of weights are not read"
        )
    shards = set(listed.values())
    absent = {file for file in shards if not (hf_dir / file).exists()}
    problems = []
    for name, file in listed.items():
        if file in absent:
            problems.append(f"{name}: its file {file} is missing")
        elif file not in held.get(name, []):
            problems.append(f"{name}: listed in the index, absent from {file}")
    for name, files in held.items():
        if len(files) > 1:
            problems.append(f"{name}: present twice, in {' and '.join(files)}; remove one copy")
        elif name not in listed and files[0] in shards:
            problems.append(f"{name}: in {files[0]}, absent from the index")
    _raise_all(hf_dir, problems)
    return {name: os.fspath(hf_dir / file) for name, file in listed.items()}


def _check_tensors(hf_dir: epath.Path, handles: Mapping[str, Any], config: ModelConfig) -> None:
    """Raises with every missing, extra or mis-shaped tensor."""
    required = _file_shapes(config)
    optional = {_HEAD: required[_EMBEDDING]} if config.tie_embeddings else {}
    problems = []
    for name in required.keys() - handles.keys():
        hint = "; tie_word_embeddings is false: is the model tied?" if name == _HEAD else ""
        problems.append(f"{name}: missing, expected {list(required[name])}{hint}")
    for name, handle in handles.items():
        part = handle.get_slice(name)
        got = f"{part.get_dtype()}{list(part.get_shape())}"
        shape = (required | optional).get(name)
        if shape is None:
            problems.append(f"{name}: unexpected, got {got}")
        elif list(shape) != list(part.get_shape()) or part.get_dtype() not in _FLOATS:
            problems.append(f"{name}: expected {'|'.join(_FLOATS)}{list(shape)}, got {got}")
    _raise_all(hf_dir, sorted(problems))
    if config.tie_embeddings and _HEAD in handles:
        head, embedding = (handles[n].get_tensor(n) for n in (_HEAD, _EMBEDDING))
        if not np.array_equal(head, embedding):
            problems = [f"{_HEAD}: differs from {_EMBEDDING}, yet tie_word_embeddings is true"]
            _raise_all(hf_dir, problems)


def _raise_all(hf_dir: epath.Path, problems: list[str]) -> None:
    if problems:
        raise ValueError(f"{hf_dir}: {len(problems)} problem(s)\n  " + "\n  ".join(problems))


# --- export ------------------------------------------------------------------------------------


def save_params(
    params: Params,
    config: ModelConfig,
    out_dir: epath.PathLike,
    *,
    source_dir: epath.PathLike | None = None,
    dtype: str = "float32",
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a Hugging Face folder, whole or not at all; imported again it is the same to the bit.

    Args:
      params: the tree that `load_params` gives, fp32, all of it on this process's devices.
      config: its ModelConfig.
      out_dir: a new or empty folder on a local disk.
      source_dir: the folder that the model was imported from. Its config.json is kept, apart from
        the stored dtype, and its tokenizer, chat template and generation config are copied.
      dtype: stored dtype, "float32", "bfloat16" or "float16".
      max_shard_bytes: weights above this size are written as shards with an index.

    Raises:
      FileExistsError: `out_dir` is not empty.
      ValueError: the tree does not fit `config`, `source_dir` is another model, the dtype is
        unknown, or a tensor is not finite in it.
    """
    if dtype not in _FLOATS.values():
        raise ValueError(f"dtype={dtype!r}: one of {', '.join(_FLOATS.values())}")
    tree.check_same(_abstract(config), params, "params do not fit the model config")
    out_dir = epath.Path(out_dir)
    if out_dir.exists() and any(out_dir.iterdir()):
        raise FileExistsError(f"out_dir={out_dir} is not empty; choose a new folder")
    content = hf_config.render(config, source_dir, dtype)

    partial = out_dir.parent / f"{out_dir.name}.partial"
    if partial.exists():
        partial.rmtree()
    partial.mkdir(parents=True)
    (partial / hf_config.CONFIG).write_text(content)
    _write_weights(params, config, partial, dtype, max_shard_bytes)
    for name in COPIED if source_dir is not None else ():
        if (epath.Path(source_dir) / name).exists():
            (epath.Path(source_dir) / name).copy(partial / name)
    if out_dir.exists():
        out_dir.rmdir()
    partial.rename(out_dir)


def _write_weights(
    params: Params, config: ModelConfig, out_dir: epath.Path, dtype: str, limit: int
) -> None:
    item = jnp.dtype(dtype).itemsize
    shapes = _file_shapes(config)
    shards, room = [[]], limit
    for name, shape in shapes.items():
        size = item * math.prod(shape)
        if size > room and shards[-1]:
            shards, room = [*shards, []], limit
        shards[-1].append(name)
        room -= size
    tensors = _tensors(params, config, dtype)
    weight_map = {}
    for i, names in enumerate(shards, 1):
        whole = len(shards) == 1
        file = WEIGHTS if whole else f"model-{i:05}-of-{len(shards):05}.safetensors"
        part = dict(itertools.islice(tensors, len(names)))
        save_file(part, os.fspath(out_dir / file), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = item * sum(math.prod(shape) for shape in shapes.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out_dir / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _tensors(params: Params, config: ModelConfig, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of the file, in the order of the table; one leaf is on the host at a time."""
    for row in _rows(config):
        leaf = params
        for key in row.path:
            leaf = leaf[key]
        leaf = np.asarray(leaf)
        for n, name in enumerate(row.names(config)):
            x = row.to_file(leaf[n] if row.path[0] == "layers" else leaf)
            stored = np.ascontiguousarray(x.astype(jnp.dtype(dtype)))
            if not np.isfinite(stored.astype(np.float32)).all():
                raise ValueError(f"{name}: not finite in {dtype}; if it is in float32, use that")
            yield name, stored


def _abstract(config: ModelConfig) -> Params:
    """The shapes of the parameter tree."""
    params: Params = {"layers": {}}
    for row in _rows(config):
        *parents, leaf = row.path
        shape = jax.ShapeDtypeStruct(row.leaf_shape(config), jnp.float32)
        (params["layers"] if parents else params)[leaf] = shape
    return params
