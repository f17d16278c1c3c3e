"""One set-up for all tests: eight fake CPU devices, strict ranks, a mesh in context."""

import fcntl
import os
import pathlib
import tempfile

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# The suite compiles far more than it computes; optimised code is run by the subprocess tests.
jax.config.update("jax_disable_most_optimizations", True)

from opd_jax.core import sharding  # noqa: E402  (the device count must be set first)


@pytest.fixture(autouse=True)
def mesh():
    """A one-device mesh, set for every test; tests of sharding set their own over it."""
    one = sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1])
    with jax.set_mesh(one):
        yield one


@pytest.fixture(scope="module")
def alone():
    """For tests that look for processes left behind: no other such module runs meanwhile."""
    lock_file = pathlib.Path(tempfile.gettempdir()) / f"opd_jax_tests_{os.getuid()}.lock"
    with lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def mesh_2x2x2():
    """Eight devices: 2 data, 2 fsdp, 2 tensor."""
    eight = sharding.make_mesh(2, 2, 2)
    with jax.set_mesh(eight):
        yield eight
