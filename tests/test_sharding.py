import jax
import pytest
from jax.sharding import PartitionSpec as P

from opd_jax.core import rng, sharding, tree


def test_spec_maps_names_by_the_table():
    assert sharding.spec("embed", "heads", "head") == P("fsdp", "tensor", None)
    assert sharding.spec("batch", None) == P(("data", "fsdp"), None)


def test_spec_refuses_collisions_and_unknown_names():
    with pytest.raises(ValueError, match=r"'heads' and 'mlp'.*'tensor'"):
        sharding.spec("heads", "mlp")
    with pytest.raises(ValueError, match=r"'batch' and 'embed'.*'fsdp'"):
        sharding.spec("batch", "embed")
    with pytest.raises(ValueError, match=r"no sharding rule.*'hedas'"):
        sharding.spec("hedas")


def test_mesh_fills_the_rest_and_refuses_what_does_not_fit():
    assert dict(sharding.make_mesh(2, -1, 2).shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert dict(sharding.make_mesh().shape) == {"data": 1, "fsdp": 8, "tensor": 1}
    with pytest.raises(ValueError, match=r"tensor=3 does not fill 8 device"):
        sharding.make_mesh(1, -1, 3)
    with pytest.raises(ValueError, match="only one size may be -1"):
        sharding.make_mesh(-1, -1, 1)


def test_gathered_arrays_are_whole_along_one_axis_only(mesh_2x2x2):
    axes = [P("tensor", "fsdp"), P(None, ("fsdp", "data")), P(("fsdp",)), P("data")]
    arrays = [
        jax.device_put(jax.numpy.zeros((8, 8)), jax.NamedSharding(mesh_2x2x2, a)) for a in axes
    ]
    found = [jax.typeof(x).sharding.spec for x in jax.jit(sharding.gathered)(arrays)]
    assert found == [P("tensor", None), P(None, "data"), P(None, None), P("data", None)]


def test_streams_differ_by_purpose_step_and_seed_and_repeat():
    def bits(*args):
        return int(jax.random.bits(rng.stream(*args)))

    keys = [bits(s, p, t) for s in (0, 1) for p in rng.PURPOSES for t in (0, 1)]
    assert len(set(keys)) == len(keys)
    assert bits(0, "rollout", 3) == bits(0, "rollout", 3)
    with pytest.raises(ValueError, match="unknown random purpose 'rolout'"):
        rng.stream(0, "rolout")


def test_tree_differences_name_every_path():
    a = {"x": jax.numpy.zeros(2), "y": {"z": jax.numpy.zeros((2, 3))}, "gone": jax.numpy.zeros(1)}
    b = {"x": jax.numpy.ones(2), "y": {"z": jax.numpy.zeros((3, 2))}, "new": jax.numpy.zeros(1)}
    with pytest.raises(ValueError, match="4 difference") as error:
        tree.check_same(a, b, "params", values=True)
    for path in (
        "['gone']: missing",
        "['new']: unexpected",
        "['x']: values",
        "['y']['z']: expected",
    ):
        assert path in str(error.value)
    tree.check_same(a, a, "params", values=True)
    assert tree.first_nonfinite({"a": {"b": jax.numpy.array([1.0, jax.numpy.nan])}}) == "['a']['b']"
