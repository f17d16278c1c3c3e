"""Checkpoints: values, layouts and types survive; kills, torn files and full disks lose nothing."""

import contextlib
import errno
import logging
import os
import pathlib
import random
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from opd_jax.core import sharding, tree
from opd_jax.core.types import TrainState
from opd_jax.infra import checkpoint
from opd_jax.infra.checkpoint import Checkpointer, CheckpointError, load_meta, load_params

# Orbax leaves coroutines behind when what it reads or writes is broken on purpose.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
REPOSITORY = pathlib.Path(__file__).parent.parent
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))


def make_state(seed: int = 0, dtype=jnp.float32) -> TrainState:
    q = np.random.default_rng(seed).standard_normal((8, 4))
    params = {"layers": {"q": jnp.asarray(q, dtype)}, "norm": jnp.ones((4,))}
    return TrainState(jnp.int32(seed), params, TX.init(params))


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def check_equal(expected, got):
    tree.check_same(expected, got, "restored", values=True)


def save_steps(directory, steps, metrics=None, keep_newest=10):
    with Checkpointer(directory, keep_newest=keep_newest) as c:
        for i, s in enumerate(steps):
            c.save(s, make_state(s), {"step": s}, metric=metrics[i] if metrics else None)


@pytest.fixture
def warnings(caplog):
    """Messages of the warnings logged so far."""
    return lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_round_trip_of_state_and_meta(tmp_path):
    state = {"train": make_state(3), "key": jax.random.key(7)}
    meta = {"ledger": {"decode": 1e18, "update": 0.1}, "ids": [1, 2], "none": None, "nan": np.nan}
    with Checkpointer(tmp_path / "new" / "dir", keep_newest=2) as c:
        assert c.restore(state) is None
        assert (c.steps(), c.latest(), c.best()) == ([], None, None)
        assert c.save(5, state, meta)
        meta["ledger"]["decode"] = 0.0  # The caller goes on counting while the file is written.
        assert not c.save(5, state, meta)
        got = c.restore(state)  # Arrays will do for a template.
    assert got.step == 5
    check_equal(state, got.state)
    assert got.meta["ledger"] == {"decode": 1e18, "update": 0.1}
    assert (got.meta["ids"], got.meta["none"]) == ([1, 2], None)
    assert np.isnan(got.meta["nan"])
    assert jax.random.uniform(got.state["key"]) == jax.random.uniform(state["key"])
    with pytest.raises(ValueError, match="values differ"):
        check_equal({**state, "key": jax.random.key(8)}, got.state)


def test_arguments_are_checked(tmp_path):
    with pytest.raises(ValueError, match="keep_newest=0"):
        Checkpointer(tmp_path, keep_newest=0)
    c = Checkpointer(tmp_path, keep_newest=1)
    with pytest.raises(TypeError, match=r"step 3.*not JSON"):
        c.save(3, make_state(), {"bad": object()})
    nowhere = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_state())
    none = jax.sharding.Mesh(np.empty((), object), ())
    with jax.set_mesh(none), pytest.raises(ValueError, match="no mesh is in context"):
        c.restore(nowhere)
    c.close()


def test_c05_kill_during_save(tmp_path):
    _kill_and_restart(tmp_path, kills=3, seed=0)


@pytest.mark.slow
def test_c05_kill_during_save_twenty_times(tmp_path):
    _kill_and_restart(tmp_path, kills=20, seed=1)


SAVE_FOR_EVER = """
import sys
import jax, jax.numpy as jnp
from opd_jax.infra.checkpoint import Checkpointer
with jax.set_mesh(jax.make_mesh((1,), ("data",))):
    with Checkpointer(sys.argv[1], keep_newest=2) as c:
        for step in range(1, 10**6):
            c.save(step, {"x": jnp.full((300, 1000), step, jnp.float32)}, {"step": step})
            c.wait()
            print(step, flush=True)
"""


def _kill_and_restart(tmp_path, kills, seed):
    """Kills savers, two at a time, at random moments; restores and saves the same step again."""
    rng = random.Random(seed)
    cut = 0
    for first in range(0, kills, 3):
        directories = [tmp_path / str(i) for i in range(first, min(first + 3, kills))]
        running = [(d, _python(SAVE_FOR_EVER, d)) for d in directories]
        for directory, process in running:
            process.stdout.readline()  # The first save is complete.
            time.sleep(rng.uniform(0.0, 0.3))
            process.kill()
            done = [1] + [int(x) for x in process.stdout.read().split()]
            process.communicate()
            cut += bool(list(directory.glob("*tmp*")))
            like = {"x": jnp.zeros((300, 1000))}
            with Checkpointer(directory, keep_newest=2) as c:
                got = c.restore(abstract(like))
                # The last line may have been lost between the rename and the print.
                assert done[-1] <= got.step <= done[-1] + 1
                assert got.meta == {"step": got.step}
                assert (np.asarray(got.state["x"]) == got.step).all()
                c.save(got.step + 1, {"x": jnp.full((300, 1000), -1.0)}, {})
                assert c.restore(abstract(like)).state["x"][0, 0] == -1.0
    assert kills < 20 or cut > 0, "no kill fell into a save: the test has seen nothing"


def _python(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_c05_what_a_kill_leaves_is_ignored_and_saved_over(tmp_path):
    save_steps(tmp_path, [1, 2])
    leftover = (tmp_path / "2").rename(tmp_path / "2.orbax-checkpoint-tmp")
    with Checkpointer(tmp_path, keep_newest=5) as c:
        assert c.restore(abstract(make_state())).step == 1
        assert leftover.exists()
        c.save(2, make_state(2), {})
        assert c.restore(abstract(make_state())).step == 2
    assert not leftover.exists()


def test_c07_truncated_file_falls_back_and_never_starts_afresh(tmp_path, warnings):
    save_steps(tmp_path, [1, 2])
    files = [f for f in (tmp_path / "2").rglob("*") if f.is_file()]
    largest = max(files, key=lambda f: f.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    with Checkpointer(tmp_path, keep_newest=1) as c:
        got = c.restore(abstract(make_state()))
        check_equal(make_state(1), got.state)
        assert any(f"{tmp_path}/2 cannot be read" in w and "next older" in w for w in warnings())
        assert c.steps() == [1]
        with pytest.raises(CheckpointError, match="cannot be read"):
            c.restore(abstract(make_state()), step=2)
        # Reaching step 2 again moves the broken one aside and keeps it.
        c.save(2, make_state(2), {})
        check_equal(make_state(2), c.restore(abstract(make_state())).state)
    assert (tmp_path / "2.unreadable").is_dir()
    shutil.rmtree(tmp_path / "2" / "state")
    with (
        Checkpointer(tmp_path, keep_newest=1) as c,
        pytest.raises(CheckpointError, match="none of the checkpoints"),
    ):
        c.restore(abstract(make_state()))


def test_c07_no_file_can_be_cut_and_give_other_values(tmp_path, warnings):
    """Every file in turn halved or emptied: right values, or the older checkpoint."""
    save_steps(tmp_path / "whole", [1, 2])
    files = sorted(
        f.relative_to(tmp_path / "whole" / "2")
        for f in (tmp_path / "whole" / "2").rglob("*")
        if f.is_file()
    )
    fell_back = set()
    for share in (0.0, 0.5):
        for file in files:
            shutil.copytree(tmp_path / "whole", tmp_path / "cut")
            path = tmp_path / "cut" / "2" / file
            os.truncate(path, int(path.stat().st_size * share))
            with Checkpointer(tmp_path / "cut", keep_newest=9) as c:
                got = c.restore(abstract(make_state()))
            check_equal(make_state(got.step), got.state)
            assert got.meta == {"step": got.step}
            if got.step == 1:
                fell_back.add(str(file))
            shutil.rmtree(tmp_path / "cut")
    assert {"meta/data.json", "state/_METADATA", "state/manifest.ocdbt"} <= fell_back


def test_c08_failed_async_save_surfaces(tmp_path, monkeypatch):
    directory = tmp_path / "c"
    c = Checkpointer(directory, keep_newest=2)
    c.save(1, make_state(1), {})
    c.wait()
    block = threading.Event()
    real = checkpoint.ocp.save_checkpointables_async

    class Failing:
        def __init__(self, response):
            self.response = response

        def result(self):
            block.wait()
            self.response.result()
            raise PermissionError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(
        checkpoint.ocp, "save_checkpointables_async", lambda *a, **k: Failing(real(*a, **k))
    )
    assert c.save(2, make_state(2), {})  # Returns before it fails.
    block.set()
    with pytest.raises(CheckpointError, match=r"saving step 2 .*Read-only.*complete.*\[1\]"):
        c.save(3, make_state(3), {})
    assert c.save(3, make_state(3), {})
    with pytest.raises(CheckpointError, match="saving step 3"):
        c.close()
    c.close()  # Said once.


def test_c08_directory_that_vanished_surfaces(tmp_path):
    directory = tmp_path / "c"
    c = Checkpointer(directory, keep_newest=2)
    c.save(1, make_state(1), {})
    c.wait()
    shutil.rmtree(directory)
    directory.write_text("a file where the directory was")
    with pytest.raises(CheckpointError, match="can be written"):
        c.save(2, make_state(2), {})
    c.close()


@contextlib.contextmanager
def small_disk(directory, megabytes):
    directory.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(directory)]
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def big_state(value):
    """15 MB that do not compress."""
    noise = np.random.default_rng(value).standard_normal((15, 250_000), np.float32)
    return {"x": jnp.asarray(noise)}


def test_c10_disk_full(tmp_path):
    if shutil.which("mount") is None:
        pytest.skip("there is no mount program")
    disk = tmp_path / "disk"
    with small_disk(disk, 20):
        c = Checkpointer(disk / "c", keep_newest=1)
        c.save(1, big_state(1), {})
        c.wait()
        c.save(2, big_state(2), {})
        with pytest.raises(CheckpointError, match=r"step 2 .*disk is full.*\[1\]"):
            c.wait()
        assert [p.name for p in (disk / "c").iterdir()] == ["1"]  # The space is free again.
        check_equal(big_state(1), c.restore(abstract(big_state(0))).state)
        subprocess.run(["mount", "-o", "remount,size=40m", str(disk)], check=True)
        c.save(2, big_state(2), {})
        c.close()
        assert c.steps() == [2]
        check_equal(big_state(2), c.restore(abstract(big_state(0))).state)


def test_c11_best_and_newest_survive(tmp_path):
    save_steps(tmp_path, [100, 200, 300, 400, 500], metrics=[5, 4, 3, 2, 1], keep_newest=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["100", "400", "500"]
    with Checkpointer(tmp_path, keep_newest=2) as c:
        assert (c.steps(), c.latest(), c.best()) == ([100, 400, 500], 500, 100)
        assert c.restore(abstract(make_state())).step == 500
        # A NaN is never the best, an equal metric keeps the earlier one, a better one replaces it.
        c.save(600, make_state(), {}, metric=float("nan"))
        c.save(700, make_state(), {}, metric=5.0)
        c.wait()
        assert (c.steps(), c.best()) == ([100, 600, 700], 100)
        c.save(800, make_state(), {}, metric=6.0)
        c.wait()
        assert (c.steps(), c.best()) == ([700, 800], 800)
    assert load_params(tmp_path, "best").step == 800


def test_c11_a_metric_measured_after_the_save_is_added(tmp_path):
    with Checkpointer(tmp_path, keep_newest=1) as c:
        c.save(1, make_state(1), {"history": []})
        assert c.save(1, make_state(1), {"history": [0.5]}, metric=0.5)
        assert not c.save(1, make_state(1), {"history": []})  # A later save takes nothing away.
        c.save(2, make_state(2), {}, metric=0.4)
    with Checkpointer(tmp_path, keep_newest=1) as c:
        assert (c.steps(), c.best()) == ([1, 2], 1)
        got = c.restore(abstract(make_state()), step=1)
    check_equal(make_state(1), got.state)
    assert got.meta == {"history": [0.5]}
    assert sorted(p.name for p in (tmp_path / "1" / "meta").glob("data*")) == ["data.json"]


def test_steps_that_serve_as_teachers_stay(tmp_path):
    with Checkpointer(tmp_path, keep_newest=1, keep_steps=(2, 5)) as c:
        for step in (1, 2, 3, 4):
            c.save(step, make_state(step), {})
        c.wait()
        assert c.steps() == [2, 4]


def test_c12_dtype_shape_and_structure_must_match(tmp_path):
    saved = {"a": jnp.int32(16777217), "b": jnp.ones((2, 3)), "c": jnp.ones((2,)), "d": jnp.ones(1)}
    wanted = {
        "a": jnp.float32(0),
        "b": jnp.ones((2, 3), jnp.bfloat16),
        "c": jnp.ones((3,)),
        "e": jnp.ones(1),
    }
    with Checkpointer(tmp_path, keep_newest=3) as c:
        c.save(1, saved, {})
        c.save(2, saved, {})
        with pytest.raises(ValueError, match="5 leaves differ") as error:
            c.restore(abstract(wanted))  # Not passed over: every older one would differ as well.
        check_equal(saved, c.restore(abstract(saved)).state)
    lines = [line.strip() for line in str(error.value).splitlines()[1:]]
    assert lines == [
        "a: saved int32[], wanted float32[]",
        "b: saved float32[2, 3], wanted bfloat16[2, 3]",
        "c: saved float32[2], wanted float32[3]",
        "d: saved float32[1], wanted nothing",
        "e: saved nothing, wanted float32[1]",
    ]


def test_c14_restore_on_another_mesh(tmp_path):
    values = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    eight = sharding.make_mesh(2, 2, 2)
    with jax.set_mesh(eight), Checkpointer(tmp_path, keep_newest=1) as c:
        x = jax.device_put(values, NamedSharding(eight, PartitionSpec(("data", "fsdp"), "tensor")))
        c.save(1, {"x": x}, {})
    two = jax.make_mesh((2,), ("renamed",), devices=jax.devices()[6:])
    one = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    for mesh, spec in ((two, (None, "renamed")), (two, ()), (one, ("data",))):
        layout = NamedSharding(mesh, PartitionSpec(*spec))
        with Checkpointer(tmp_path, keep_newest=1) as c:
            got = c.restore({"x": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=layout)})
        assert got.state["x"].sharding == layout
        np.testing.assert_array_equal(np.asarray(got.state["x"]), values)


def test_c14_eval_shape_under_a_mesh_is_template_enough(tmp_path, mesh_2x2x2):
    def init(key):
        layout = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec("fsdp", "tensor"))
        params = {"q": jax.sharding.reshard(jax.random.normal(key, (8, 4)), layout)}
        return TrainState(jnp.int32(0), params, TX.init(params))

    state = jax.jit(init)(jax.random.key(0))
    with Checkpointer(tmp_path, keep_newest=1) as c:
        c.save(1, state, {})
        got = c.restore(jax.eval_shape(init, jax.random.key(0)))
    check_equal(state, got.state)
    assert jax.tree.map(jax.typeof, got.state) == jax.tree.map(jax.typeof, state)
    assert got.state.params["q"].sharding.spec == PartitionSpec("fsdp", "tensor")


def test_c15_tree_types_and_the_next_update_are_kept(tmp_path):
    @jax.jit
    def update(state):
        gradient = jax.tree.map(lambda x: 0.1 * x + 0.01, state.params)
        change, opt_state = TX.update(gradient, state.opt_state, state.params)
        return TrainState(state.step + 1, optax.apply_updates(state.params, change), opt_state)

    state = update(update(make_state()))
    with Checkpointer(tmp_path, keep_newest=1) as c:
        c.save(2, state, {})
        got = c.restore(abstract(state)).state
    assert jax.tree.structure(got) == jax.tree.structure(state)
    assert type(got.opt_state[1][0]) is optax.ScaleByAdamState
    check_equal(update(state), update(got))
    without_moments = TrainState(got.step, got.params, TX.init(got.params))
    assert tree.differences(update(state), update(without_moments), values=True)


def test_c20_close_waits_also_when_the_loop_raises(tmp_path):
    def loop():
        with Checkpointer(tmp_path, keep_newest=1) as c:
            c.save(1, make_state(1), {"last": True})
            raise KeyError("the loop")

    with pytest.raises(KeyError, match="the loop"):
        loop()
    with Checkpointer(tmp_path, keep_newest=1) as c:
        got = c.restore(abstract(make_state()))
    check_equal(make_state(1), got.state)
    assert got.meta == {"last": True}


def test_c22_donation_right_after_an_async_save(tmp_path):
    state = {"x": jnp.zeros((500_000,), jnp.float32)}
    add = jax.jit(lambda s: {"x": s["x"] + 1}, donate_argnums=0)
    with Checkpointer(tmp_path, keep_newest=9) as c:
        for step in range(4):
            c.save(step, state, {})
            state = add(state)
            before, state = state, add(state)
            assert before["x"].is_deleted()  # Otherwise nothing is donated and nothing tested.
        for step in range(4):
            got = c.restore(abstract(state), step=step).state["x"]
            assert (np.asarray(got) == 2 * step).all()


def test_c26_a_copy_restores_and_unknown_directories_stay(tmp_path, warnings):
    save_steps(tmp_path / "a", [1, 2, 3])
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    unknown = ["notes", "my.deleting", "7.orbax-checkpoint-tmp", "4.unreadable", "tb"]
    for name in unknown:
        (tmp_path / "b" / name).mkdir()
        (tmp_path / "b" / name / "file").write_text("mine")
    (tmp_path / "b" / "9").mkdir()  # A copy under way: the newest, and incomplete.
    with Checkpointer(tmp_path / "b", keep_newest=1) as c:
        assert c.restore(abstract(make_state())).step == 3
        assert any("b/9 cannot be read" in w for w in warnings())
        c.save(4, make_state(4), {})
        c.wait()
        c.save(9, make_state(9), {})
    left = {p.name for p in (tmp_path / "b").iterdir()}
    assert left == {*unknown, "9", "9.unreadable"}
    assert all((tmp_path / "b" / name / "file").exists() for name in unknown)


def test_a_deletion_cut_short_is_finished_later(tmp_path):
    save_steps(tmp_path, [1, 2])
    (tmp_path / "1").rename(tmp_path / "1.deleting")
    with Checkpointer(tmp_path, keep_newest=2) as c:
        assert c.steps() == [2]
        c.save(3, make_state(3), {})
    assert {p.name for p in tmp_path.iterdir()} == {"2", "3"}


def test_load_params_without_the_optimizer(tmp_path, mesh_2x2x2):
    save_steps(tmp_path, [1, 2, 3], metrics=[0.1, 0.3, 0.2])
    got = load_params(tmp_path)
    assert (got.step, got.meta) == (3, {"step": 3})
    assert all(type(x) is np.ndarray for x in jax.tree.leaves(got.state))
    check_equal(jax.tree.map(np.asarray, make_state(3).params), got.state)
    assert (load_meta(tmp_path), load_meta(tmp_path, "best")) == ({"step": 3}, {"step": 2})
    assert (load_params(tmp_path, "best").step, load_params(tmp_path, 1).step) == (2, 1)
    layout = NamedSharding(mesh_2x2x2, PartitionSpec("fsdp"))
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), make_state().params
    )
    placed = load_params(tmp_path, "best", wanted).state
    assert placed["layers"]["q"].sharding == layout
    check_equal(make_state(2).params, placed)
    with pytest.raises(ValueError, match=r"params/layers/q: saved float32.*wanted bfloat16"):
        load_params(tmp_path, None, abstract(make_state(dtype=jnp.bfloat16).params))
    with pytest.raises(CheckpointError, match=r"no 7 .*\[1, 2, 3\]"):
        load_params(tmp_path, 7)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        load_params(tmp_path / "nowhere")


def test_load_params_never_takes_another_step(tmp_path):
    save_steps(tmp_path, [1, 2])
    (tmp_path / "2" / "state" / "_METADATA").unlink()
    with pytest.raises(CheckpointError, match="2 cannot be read"):
        load_params(tmp_path)
    with pytest.raises(CheckpointError, match="'best'"):
        load_params(tmp_path, "best")


TWO_PROCESSES = textwrap.dedent(
    """
    import sys
    import jax, numpy as np
    process, port, directory, phase = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
    from opd_jax.infra.checkpoint import Checkpointer, load_params
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"))
    jax.set_mesh(mesh)
    layout = jax.NamedSharding(mesh, jax.P("fsdp", "tensor"))
    mine = np.arange(32, dtype=np.float32).reshape(4, 8) + 100 * process
    x = jax.make_array_from_process_local_data(layout, mine)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)
    same = jax.jit(lambda a, b: (a == b).all())
    with Checkpointer(directory, keep_newest=2) as c:
        if phase == "save":
            assert c.restore({"params": {"x": like}}) is None
            for step in (1, 2, 3):
                c.save(step, {"params": {"x": x + step}}, {"step": step}, metric=-step)
            c.wait()
            assert (c.steps(), c.best()) == ([1, 2, 3], 1), c.steps()
        else:
            got = c.restore({"params": {"x": like}})
            assert (got.step, got.meta) == (2, {"step": 2}), got
            assert got.state["params"]["x"].sharding == layout
            assert bool(same(got.state["params"]["x"], x + 2))
            assert c.save(3, {"params": {"x": x}}, {})
    print("fine")
    """
)


@pytest.mark.slow
def test_two_processes_share_a_checkpoint(tmp_path):
    """Sharded over two processes: save, lose the newest's data, fall back together, save again."""
    _run_two(tmp_path / "c", "save")
    for data in (tmp_path / "c" / "3" / "state").rglob("d/*"):
        os.truncate(data, data.stat().st_size // 2)
    _run_two(tmp_path / "c", "resume")
    assert {p.name for p in (tmp_path / "c").iterdir()} == {"1", "2", "3", "3.unreadable"}
    got = load_params(tmp_path / "c", 2).state["x"]
    block = np.arange(32, dtype=np.float32).reshape(4, 8)
    np.testing.assert_array_equal(got, np.concatenate([block, block + 100]) + 2)


def _run_two(directory, phase):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    running = [_python(TWO_PROCESSES, i, port, directory, phase) for i in range(2)]
    for process in running:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out.endswith("fine\n")


def test_a_relative_directory_is_one_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = {"params": {"w": jnp.arange(3.0)}}
    with Checkpointer("runs/a", keep_newest=1) as checkpointer:
        checkpointer.save(1, state, {"note": "here"})
    assert (tmp_path / "runs" / "a" / "1").is_dir()
    restored = load_params("runs/a")
    assert restored.meta == {"note": "here"}
    np.testing.assert_array_equal(restored.state["w"], [0, 1, 2])
