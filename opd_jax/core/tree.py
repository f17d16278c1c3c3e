"""Trees of arrays: comparison with readable errors, sizes, casts."""

from typing import Any

import jax
import jax.numpy as jnp


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Every leaf under its readable key path, e.g. `['layers']['q']`."""
    return {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(tree)}


def differences(expected: Any, got: Any, *, values: bool = False) -> list[str]:
    """Every place where two trees differ: in structure, shape, dtype and, if asked, value."""
    a, b = leaves_by_path(expected), leaves_by_path(got)
    found = [f"{path}: missing, expected {_describe(a[path])}" for path in a if path not in b]
    found += [f"{path}: unexpected, got {_describe(b[path])}" for path in b if path not in a]
    for path in a:
        if path not in b:
            continue
        if _describe(a[path]) != _describe(b[path]):
            found.append(f"{path}: expected {_describe(a[path])}, got {_describe(b[path])}")
        elif values and not _equal(a[path], b[path]):
            found.append(f"{path}: values differ")
    return found


def check_same(expected: Any, got: Any, what: str, *, values: bool = False) -> None:
    """Raises ValueError with one line per differing key path if two trees are not alike."""
    found = differences(expected, got, values=values)
    if found:
        raise ValueError(f"{what}: {len(found)} difference(s)\n  " + "\n  ".join(found))


def count(tree: Any) -> int:
    """Number of scalars in a tree."""
    return sum(int(x.size) for x in jax.tree.leaves(tree))


def cast(tree: Any, dtype: Any) -> Any:
    """Floating leaves in `dtype`; others as they are."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def copy(tree: Any) -> Any:
    """Arrays with buffers of their own, so that donating the original cannot delete the copy."""
    return jax.tree.map(jnp.copy, tree)


def first_nonfinite(tree: Any) -> str | None:
    """Key path of the first leaf that holds a NaN or an infinity; None if all are finite."""
    for path, x in leaves_by_path(tree).items():
        if jnp.issubdtype(x.dtype, jnp.inexact) and not bool(jnp.isfinite(x).all()):
            return path
    return None


def _describe(x: Any) -> str:
    return f"{getattr(x, 'dtype', type(x).__name__)}{list(getattr(x, 'shape', ()))}"


def _equal(a: Any, b: Any) -> bool:
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    return bool(jnp.array_equal(a, b, equal_nan=jnp.issubdtype(a.dtype, jnp.inexact)))
