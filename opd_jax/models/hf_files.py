"""Safetensors files of a Hugging Face folder: what they hold, opened and written, local or remote.

The safetensors library reads and writes local files only, so a remote file (`gs://...`, wherever
etils.epath can open one) passes through a temporary folder, one at a time.
"""

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from etils import epath
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_MAX_HEADER = 100 * 2**20  # The format's own limit, in bytes.


@dataclasses.dataclass(frozen=True)
class Stored:
    """One tensor of a folder, as its file's header describes it."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def _is_local(path: epath.Path) -> bool:
    return "://" not in os.fspath(path)


@contextlib.contextmanager
def opened(path: epath.Path) -> Iterator[Any]:
    """A safetensors file, copied to a temporary folder first if it is remote."""
    with contextlib.ExitStack() as stack:
        local = os.fspath(path)
        if not _is_local(path):
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
            local = os.path.join(scratch, path.name)
            path.copy(local)
        try:
            file = stack.enter_context(safe_open(local, framework="np"))
        except SafetensorError as error:
            problem = f"{path}: not a whole safetensors file ({error}); get it again"
            raise ValueError(problem) from error
        yield file


def _header(path: epath.Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, without reading them.

    Raises:
      ValueError: the file is not whole.
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size) if size <= _MAX_HEADER else b"")
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = 8 + size + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: not a safetensors file ({error}); get it again") from error
    if path.stat().length != end:
        raise ValueError(
            f"{path}: not a whole safetensors file: {path.stat().length} bytes, its header says "
            f"{end}; get it again"
        )
    return {
        name: Stored(path.name, entry["dtype"], tuple(entry["shape"]))
        for name, entry in entries.items()
    }


def locate(hf_dir: epath.Path) -> dict[str, Stored]:
    """Every tensor, the index checked against what the files hold."""
    held: dict[str, list[Stored]] = {}
    for file in sorted(hf_dir.glob("*.safetensors")):
        for name, stored in _header(file).items():
            held.setdefault(name, []).append(stored)
    if (hf_dir / INDEX).exists():
        listed: dict[str, str] = json.loads((hf_dir / INDEX).read_text())["weight_map"]
    elif (hf_dir / WEIGHTS).exists():
        listed = {name: WEIGHTS for name, copies in held.items() if copies[0].file == WEIGHTS}
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
        elif name not in held or file not in {stored.file for stored in held[name]}:
            problems.append(f"{name}: listed in the index, absent from {file}")
    for name, copies in held.items():
        files = [stored.file for stored in copies]
        if len(files) > 1:
            problems.append(f"{name}: present twice, in {' and '.join(files)}; remove one copy")
        elif name not in listed and files[0] in shards:
            problems.append(f"{name}: in {files[0]}, absent from the index")
    raise_all(hf_dir, problems)
    return {name: held[name][0] for name in listed}


def write(tensors: dict[str, np.ndarray], path: epath.Path) -> None:
    """A safetensors file, written to a temporary folder first if it belongs elsewhere."""
    metadata = {"format": "pt"}
    if _is_local(path):
        save_file(tensors, os.fspath(path), metadata=metadata)
        return
    with tempfile.TemporaryDirectory() as scratch:
        local = epath.Path(scratch) / path.name
        save_file(tensors, os.fspath(local), metadata=metadata)
        local.copy(path)


def raise_all(hf_dir: epath.Path, problems: list[str]) -> None:
    """Raises ValueError with every problem of a folder, if there is any."""
    if problems:
        raise ValueError(f"{hf_dir}: {len(problems)} problem(s)\n  " + "\n  ".join(problems))
