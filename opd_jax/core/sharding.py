"""The device mesh and the one table that maps logical axis names to mesh axes.

Mesh axes are explicit (`jax.make_mesh`'s default): a forgotten layout is an error when a step is
traced, not a silent gather. Three axes: `data` replicates parameters, `fsdp` shards them with the
batch, `tensor` shards heads, MLP and vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")

# Logical axis -> mesh axis. Parameters use the upper half, activations the lower.
RULES: dict[str, str | tuple[str, ...] | None] = {
    "layers": None,
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head": None,
    "mlp": "tensor",
    "norm": None,
    "rank": None,
    "batch": BATCH,
    "time": None,
    "act": None,
    "samples": None,
}


def spec(*names: str | None) -> PartitionSpec:
    """PartitionSpec of an array whose axes have these logical names (None: not sharded).

    Raises:
      ValueError: a name has no rule, or two axes of the array would use one mesh axis.
    """
    unknown = [n for n in names if n is not None and n not in RULES]
    if unknown:
        raise ValueError(f"no sharding rule for logical axis {unknown}; known: {sorted(RULES)}")
    axes = [None if n is None else RULES[n] for n in names]
    used: dict[str, str] = {}
    for name, axis in zip(names, axes, strict=True):
        for a in (axis,) if isinstance(axis, str) else axis or ():
            if a in used:
                raise ValueError(
                    f"logical axes {used[a]!r} and {name!r} of {names} both map to mesh axis {a!r}"
                )
            used[a] = name
    return PartitionSpec(*axes)


def make_mesh(
    data: int = 1, fsdp: int = -1, tensor: int = 1, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """A mesh with explicit axes over `devices` (default all); a size of -1 takes the rest.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.
    """
    sizes = [data, fsdp, tensor]
    total = jax.device_count() if devices is None else len(devices)
    if sizes.count(-1) > 1:
        raise ValueError(f"mesh {dict(zip(AXES, sizes, strict=True))}: only one size may be -1")
    if -1 in sizes:
        known = math.prod(s for s in sizes if s != -1)
        sizes[sizes.index(-1)] = total // known if known and total % known == 0 else 0
    if math.prod(sizes) != total or min(sizes) < 1:
        raise ValueError(
            f"mesh data={data} fsdp={fsdp} tensor={tensor} does not fill {total} device(s); "
            "the sizes must multiply to the device count (-1 fills the rest)"
        )
    types = (jax.sharding.AxisType.Explicit,) * len(AXES)
    return jax.make_mesh(sizes, AXES, axis_types=types, devices=devices)


def sharding(mesh: jax.sharding.Mesh, *names: str | None) -> NamedSharding:
    """The layout on `mesh` of an array whose axes have these logical names."""
    return NamedSharding(mesh, spec(*names))


def axis_size(axis: str | Sequence[str]) -> int:
    """Devices along one or several axes of the mesh in context."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape[a] for a in ((axis,) if isinstance(axis, str) else axis))


def take_rows(x: jax.Array, rows: Any, *names: str | None) -> jax.Array:
    """`x[rows]` along the first axis, laid out by the logical names of the result."""
    return x.at[rows].get(out_sharding=spec(*names))


def gathered(tree: Any, axis: str = "fsdp") -> Any:
    """Arrays no longer split along one mesh axis; along the others they stay as they are."""

    def without(part: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if isinstance(part, tuple):
            return tuple(a for a in part if a != axis) or None
        return None if part == axis else part

    def gather(x: jax.Array) -> jax.Array:
        return jax.sharding.reshard(x, PartitionSpec(*map(without, jax.typeof(x).sharding.spec)))

    return jax.tree.map(gather, tree)


def put(mesh: jax.sharding.Mesh, tree: Any) -> Any:
    """Host arrays onto the mesh, their first axis sharded as the batch.

    On several hosts each gives the whole arrays, equal everywhere, and sends its own rows only.
    """

    def place(x: Any) -> jax.Array:
        layout = sharding(mesh, "batch", *(None,) * (x.ndim - 1))
        if layout.is_fully_addressable or isinstance(x, jax.Array):
            return jax.device_put(x, layout)
        # device_put would compare all hosts' copies first, in a collective of its own.
        return jax.make_array_from_callback(x.shape, layout, x.__getitem__)

    return jax.tree.map(place, tree)
