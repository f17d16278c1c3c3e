"""Hugging Face folders in and out, for every family, through one mapping table.

A folder holds `config.json` and either `model.safetensors` or shards with
`model.safetensors.index.json`. Its rotary layout is half-split like ours, so query and key rows are
never permuted. What cannot be represented here is refused by name, never ignored.
Folders may be remote, see hf_files.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from opd_jax.core import tree
from opd_jax.core.types import Params
from opd_jax.models import hf_config, hf_files
from opd_jax.models.config import ModelConfig
from opd_jax.models.hf_config import read_config as read_config

COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json",
          "added_tokens.json", "merges.txt", "tokenizer.model", "chat_template.jinja",
          "generation_config.json")  # fmt: skip

_FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_ROWS = 1024  # Of a table compared at a time.


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
    when: Callable[[ModelConfig], bool]  # Which models have it.

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

    def read(
        self, file: Any, name: str, index: tuple[slice, ...], config: ModelConfig
    ) -> np.ndarray:
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
        return block[tuple(rest[c] if c in rest else slice(None) for c in self.tree_axes)]


def _row(
    path: str,
    name: str,
    file_axes: str,
    tree_axes: str,
    when: Callable[[ModelConfig], bool] = lambda c: True,
) -> Row:
    return Row(tuple(path.split(".")), name, tuple(file_axes.split()), tree_axes, when)


_LAYER = "model.layers.{n}."
_ATTENTION, _MLP = _LAYER + "self_attn.", _LAYER + "mlp."

TABLE = (
    _row("embedding", "model.embed_tokens.weight", "V D", "VD"),
    _row("final_norm", "model.norm.weight", "D", "D"),
    _row("head", "lm_head.weight", "V D", "VD", lambda c: not c.tie_embeddings),
    _row("layers.attn_norm", _LAYER + "input_layernorm.weight", "D", "D"),
    _row("layers.q", _ATTENTION + "q_proj.weight", "HE D", "DHE"),
    _row("layers.k", _ATTENTION + "k_proj.weight", "KE D", "DKE"),
    _row("layers.v", _ATTENTION + "v_proj.weight", "KE D", "DKE"),
    _row("layers.q_bias", _ATTENTION + "q_proj.bias", "HE", "HE", lambda c: c.qkv_bias),
    _row("layers.k_bias", _ATTENTION + "k_proj.bias", "KE", "KE", lambda c: c.qkv_bias),
    _row("layers.v_bias", _ATTENTION + "v_proj.bias", "KE", "KE", lambda c: c.qkv_bias),
    _row("layers.q_norm", _ATTENTION + "q_norm.weight", "E", "E", lambda c: c.qk_norm),
    _row("layers.k_norm", _ATTENTION + "k_norm.weight", "E", "E", lambda c: c.qk_norm),
    _row("layers.o", _ATTENTION + "o_proj.weight", "D HE", "HED"),
    # One name, two meanings: without norms behind, it is the norm in front of the MLP.
    _row("layers.attn_post_norm", _LAYER + "post_attention_layernorm.weight", "D", "D",
         lambda c: c.post_norms),
    _row("layers.mlp_norm", _LAYER + "post_attention_layernorm.weight", "D", "D",
         lambda c: not c.post_norms),
    _row("layers.mlp_norm", _LAYER + "pre_feedforward_layernorm.weight", "D", "D",
         lambda c: c.post_norms),
    _row("layers.mlp_post_norm", _LAYER + "post_feedforward_layernorm.weight", "D", "D",
         lambda c: c.post_norms),
    _row("layers.gate", _MLP + "gate_proj.weight", "F D", "DF"),
    _row("layers.up", _MLP + "up_proj.weight", "F D", "DF"),
    _row("layers.down", _MLP + "down_proj.weight", "D F", "FD"),
)  # fmt: skip
_EMBEDDING, _HEAD = TABLE[0].name, TABLE[2].name


def _sizes(config: ModelConfig) -> dict[str, int]:
    return {"V": config.vocab_size, "D": config.embed_dim, "H": config.num_heads,
            "K": config.num_kv_heads, "E": config.head_dim, "F": config.mlp_dim}  # fmt: skip


def _rows(config: ModelConfig) -> list[Row]:
    return [row for row in TABLE if row.when(config)]


def _file_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the file and its shape there, in the order of the table."""
    return {name: row.file_shape(config) for row in _rows(config) for name in row.names(config)}


# --- import ------------------------------------------------------------------------------------


def load_params(
    hf_dir: epath.PathLike, config: ModelConfig, shardings: Params | None = None
) -> Params:
    """The parameters in a folder's safetensors, fp32, streamed tensor by tensor onto their layout.

    Everything is checked against `config` before any device memory is used. Shards are read one
    after the other, and of each tensor one layout's part at a time: the host never holds more than
    one file and a part of one tensor. Devices hold the parameters and, while a leaf's layers are
    joined, that leaf once more.

    Args:
      hf_dir: a folder with `model.safetensors`, or shards and their index.
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
    tensors = hf_files.locate(hf_dir)
    if shardings is not None:
        odd = tree.leaves_by_path(_abstract(config)).keys() ^ tree.leaves_by_path(shardings).keys()
        if odd:
            raise ValueError(f"shardings: not the tree of the parameters, see {sorted(odd)}")
    _check_tensors(hf_dir, tensors, config)
    if config.tie_embeddings and _HEAD in tensors:
        _check_tied(hf_dir, tensors)
    rows = {name: row for row in _rows(config) for name in row.names(config)}
    pieces: dict[str, jax.Array] = {}
    for file in sorted({tensors[name].file for name in rows}):
        with hf_files.opened(hf_dir / file) as opened:
            for name, row in rows.items():
                if tensors[name].file == file:
                    layout = None if shardings is None else _at(shardings, row.path)
                    pieces[name] = _piece(row, opened, name, config, layout)
    params: Params = {"layers": {}}
    for row in _rows(config):
        parts = [pieces.pop(name) for name in row.names(config)]
        *parents, leaf = row.path
        (params["layers"] if parents else params)[leaf] = jnp.stack(parts) if parents else parts[0]
    return params


def _at(params: Params, path: tuple[str, ...]) -> Any:
    for key in path:
        params = params[key]
    return params


def _piece(
    row: Row, file: Any, name: str, config: ModelConfig, layout: NamedSharding | None
) -> jax.Array:
    """One tensor, fp32, laid out as its leaf is. Each host reads its own shards only."""
    stacked = row.path[0] == "layers"
    shape = row.leaf_shape(config)[1:] if stacked else row.leaf_shape(config)

    def read(index):
        return np.ascontiguousarray(row.read(file, name, index, config))

    def settle(x: jax.Array) -> jax.Array:
        """A copy, since on a CPU an array may be the very block that was read."""
        return jax.block_until_ready(x.astype(jnp.float32, copy=True))

    if layout is None:
        return settle(jnp.asarray(read((slice(None),) * len(shape))))
    if stacked:
        layout = NamedSharding(layout.mesh, PartitionSpec(*layout.spec[1:]))
    devices: dict[tuple, list] = {}
    indices = layout.addressable_devices_indices_map(shape)
    for device, index in indices.items():
        devices.setdefault(tuple((cut.start, cut.stop) for cut in index), []).append(device)
    placed = []
    for bounds, same in devices.items():
        block = read(tuple(slice(*bound) for bound in bounds))
        placed += [jax.device_put(block, device) for device in same]
    return settle(jax.make_array_from_single_device_arrays(shape, layout, placed))


def _check_tensors(
    hf_dir: epath.Path, tensors: Mapping[str, hf_files.Stored], config: ModelConfig
) -> None:
    """Raises with every missing, extra or mis-shaped tensor."""
    required = _file_shapes(config)
    optional = {_HEAD: required[_EMBEDDING]} if config.tie_embeddings else {}
    problems = []
    for name in required.keys() - tensors.keys():
        hint = "; tie_word_embeddings is false: is the model tied?" if name == _HEAD else ""
        problems.append(f"{name}: missing, expected {list(required[name])}{hint}")
    known = required | optional
    for name, stored in tensors.items():
        got = f"{stored.dtype}{list(stored.shape)}"
        if name not in known:
            problems.append(f"{name}: unexpected, got {got}")
        elif known[name] != stored.shape or stored.dtype not in _FLOATS:
            problems.append(f"{name}: expected {'|'.join(_FLOATS)}{list(known[name])}, got {got}")
    hf_files.raise_all(hf_dir, sorted(problems))


def _check_tied(hf_dir: epath.Path, tensors: Mapping[str, hf_files.Stored]) -> None:
    """Raises if a tied model's file has a head that is not its embedding."""
    with (
        hf_files.opened(hf_dir / tensors[_HEAD].file) as head,
        hf_files.opened(hf_dir / tensors[_EMBEDDING].file) as embedding,
    ):
        parts = [file.get_slice(n) for file, n in ((head, _HEAD), (embedding, _EMBEDDING))]
        rows = tensors[_HEAD].shape[0]
        for start in range(0, rows, _ROWS):
            a, b = (part[start : min(start + _ROWS, rows)] for part in parts)
            if not np.array_equal(a, b):
                problem = f"{_HEAD}: differs from {_EMBEDDING}, yet tie_word_embeddings is true"
                hf_files.raise_all(hf_dir, [problem])


# --- export ------------------------------------------------------------------------------------


def save_params(
    params: Params,
    config: ModelConfig,
    out_dir: epath.PathLike,
    *,
    source_dir: epath.PathLike | None = None,
    dtype: str | None = "float32",
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a Hugging Face folder, whole or not at all; imported again it is the same to the bit.

    Args:
      params: the tree that `load_params` gives, fp32, all of it on this process's devices.
      config: its ModelConfig.
      out_dir: a new or empty folder.
      source_dir: the folder that the model was imported from. Its config.json is kept, apart from
        the stored dtype, and its tokenizer, chat template and generation config are copied.
      dtype: stored dtype, "float32", "bfloat16" or "float16"; None: each tensor's in `source_dir`.
      max_shard_bytes: weights above this size are written as shards with an index.

    Raises:
      FileExistsError: `out_dir` is not empty.
      ValueError: the tree does not fit `config`, `source_dir` is another model, the dtype is
        unknown, or a tensor is not finite in it.
    """
    if dtype not in (None, *_FLOATS.values()):
        raise ValueError(f"dtype={dtype!r}: one of {', '.join(_FLOATS.values())}")
    if dtype is None and source_dir is None:
        raise ValueError("dtype=None means the dtypes of source_dir: give one of the two")
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
    dtypes = dict.fromkeys(_file_shapes(config), dtype)
    if dtype is None:
        stored = hf_files.locate(epath.Path(source_dir))
        dtypes |= {name: _FLOATS[stored[name].dtype] for name in dtypes if name in stored}
    _write_weights(params, config, partial, dtypes, max_shard_bytes)
    for name in COPIED if source_dir is not None else ():
        if (epath.Path(source_dir) / name).exists():
            (epath.Path(source_dir) / name).copy(partial / name)
    if out_dir.exists():
        out_dir.rmdir()
    partial.rename(out_dir)


def _write_weights(
    params: Params, config: ModelConfig, out_dir: epath.Path, dtypes: Mapping[str, str], limit: int
) -> None:
    shapes = _file_shapes(config)
    sizes = {n: jnp.dtype(dtypes[n]).itemsize * math.prod(shape) for n, shape in shapes.items()}
    shards, room = [[]], limit
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards, room = [*shards, []], limit
        shards[-1].append(name)
        room -= size
    tensors = _tensors(params, config, dtypes)
    weight_map = {}
    for i, names in enumerate(shards, 1):
        whole = len(shards) == 1
        file = hf_files.WEIGHTS if whole else f"model-{i:05}-of-{len(shards):05}.safetensors"
        hf_files.write(dict(itertools.islice(tensors, len(names))), out_dir / file)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (out_dir / hf_files.INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _tensors(
    params: Params, config: ModelConfig, dtypes: Mapping[str, str]
) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of the file, in the order of the table; one leaf is on the host at a time."""
    for row in _rows(config):
        leaf = np.asarray(_at(params, row.path))
        for n, name in enumerate(row.names(config)):
            x = row.to_file(leaf[n] if row.path[0] == "layers" else leaf)
            stored = np.ascontiguousarray(x.astype(jnp.dtype(dtypes[name])))
            if not np.isfinite(stored.astype(np.float32)).all():
                raise ValueError(
                    f"{name}: not finite in {dtypes[name]}; if it is in float32, use that"
                )
            yield name, stored


def _abstract(config: ModelConfig) -> Params:
    """The shapes of the parameter tree."""
    params: Params = {"layers": {}}
    for row in _rows(config):
        *parents, leaf = row.path
        shape = jax.ShapeDtypeStruct(row.leaf_shape(config), jnp.float32)
        (params["layers"] if parents else params)[leaf] = shape
    return params
