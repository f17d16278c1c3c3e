"""Sweeps: points and commands, shared stages, skipping, failing, stopping, the table."""

import csv
import dataclasses
import functools
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import textwrap

import pytest
from absl import flags
from ml_collections import config_flags

from configs import recipe
from configs.sweeps import domain_counts, teacher_types
from opd_jax import config, points, report, sweep
from opd_jax.infra.preemption import StopSignal
from opd_jax.points import Point, grid
from tests import synthetic_records

ROOT = pathlib.Path(__file__).parent.parent
FILE = "configs/sweeps/teacher_types.py:smoke"
SELF = {
    "stages.distilled.teachers.arithmetic": "self",
    "plan": ("base", "distilled"),
    "routes.distilled": ("distilled",),
}
SWEEPS = ["configs/sweeps/teacher_types.py", "configs/sweeps/domain_counts.py"]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    """Sweep and config files are given relative to it."""
    monkeypatch.chdir(ROOT)


# Points.


@pytest.mark.parametrize("file", SWEEPS)
@pytest.mark.parametrize("size", ["full", "smoke"])
def test_the_committed_sweeps_are_valid(file, size):
    found = points.load(f"{file}:{size}", "get_sweep")
    for x in points.check(found):
        assert all(stage.steps < 10 for stage in x.stages.values()) == (size == "smoke")
    assert len({p.folder for p in found}) == len(found)
    assert {p.seed for p in found} == set(recipe.SIZES[size].seeds)


def test_teacher_types_has_every_kind_of_teacher():
    found = teacher_types.get_sweep("full")
    teachers = {p.name: p.overrides["stages.distilled.teachers.arithmetic"] for p in found}
    assert teachers == {
        "expert": "stage:expert",
        "self_grpo_early": "stage:expert@40",
        "self_grpo_late": "stage:expert@300",
        "external_wide": "stage:wide",
        "self": "self",
        "random": "random",
        "fixed_negative": "fixed_negative",
    }
    x = points.experiment(next(p for p in found if p.name == "external_wide"))
    assert x.models[x.stages["wide"].model].preset == "nano_wide"
    assert x.plan == ("base", "wide", "distilled")


def test_domain_counts_are_1_2_and_4():
    names = {}
    for point in domain_counts.get_sweep("smoke"):
        x = points.experiment(point)
        names[point.name] = tuple(x.stages["merge"].domains)
        assert len(x.routes["divide_and_merge"]) == len(names[point.name]) + 1
    assert names == {f"domains_{n}": tuple(sorted(tuple(recipe.LEVELS)[:n])) for n in (1, 2, 4)}


def test_overrides_and_seed_reach_the_experiment_as_they_do_on_the_command_line(monkeypatch):
    changes = SELF | {"stages.distilled.clip_low": 0.1, "stages.base.mask_truncated": True}
    point = Point("self", FILE, changes, 7)
    x = points.experiment(point)
    assert (x.seed, x.plan, x.stages["distilled"].clip_low) == (7, ("base", "distilled"), 0.1)
    arguments = ["main", *points.arguments(point, "/runs/a b")]
    assert arguments[-1] == "--workdir=/runs/a b/self-seed7"
    monkeypatch.setattr(sys, "argv", arguments)
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values)
    flags.DEFINE_string("workdir", None, "", flag_values=values)
    values(arguments)
    assert config.parse(values.config) == x


@pytest.mark.parametrize(
    ("point", "message"),
    [
        (Point("x", "configs/nowhere.py", {}, 0), "no file configs/nowhere.py"),
        (Point("x", "pyproject.toml", {}, 0), "pyproject.toml is no Python file"),
        (Point("x", "configs/base.py", {}, 0), "function of configs/base.py='get_config'"),
        (Point("x", "configs/smoke.py:tiny", {}, 0), "takes no argument, got 'tiny'"),
        (Point("x", f"{FILE}r", {}, 0), "size='smoker': one of full, smoke; did you mean 'smoke'?"),
        (Point("x", FILE, {"stages.distiled.steps": 1}, 0), "did you mean 'distilled'?"),
        (Point("x", FILE, {"stages.distilled.stepz": 1}, 0), "did you mean 'steps'?"),
        (Point("x", FILE, {"stages.distilled.teachers.logic": "self"}, 0), "'logic': one of"),
        (Point("x", FILE, {"stages.distilled.steps": "many"}, 0), "steps"),
        (Point("x", FILE, {"stages.distilled.steps": -1}, 0), "steps=-1: must be at least 0"),
        (Point("x", FILE, {"stages.distilled.init": "stage:bsae"}, 0), "did you mean 'base'?"),
        (Point("a/b", FILE, {}, 0), "point 'a/b'"),
    ],
)
def test_a_wrong_point_is_refused_before_any_runs(point, message, tmp_path):
    good = Point("good", FILE, {}, 0)
    with pytest.raises(ValueError, match=f"point '?{point.name}'?: ") as caught:
        sweep.run([good, point], str(tmp_path), runner=None)
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_point_that_stands_twice_is_refused():
    with pytest.raises(ValueError, match="point a, seed 0, stands in the sweep twice"):
        points.check([Point("a", FILE, {}, 0), Point("a", FILE, SELF, 0)])


# Shared stages.


def folders(overrides, seed=0, file=FILE):
    return points.stage_folders(points.experiment(Point("x", file, overrides, seed)))


def test_stages_are_shared_exactly_where_they_come_out_the_same():
    plain, own = folders({}), folders(SELF)
    assert set(own) == {"base", "distilled"}
    assert own["base"] == plain["base"]
    assert own["distilled"] != plain["distilled"]
    for path, value, changed in [
        ("seed", 1, {"base", "expert", "distilled"}),
        ("evaluation.every", 2, {"base", "expert", "distilled"}),
        ("checkpoint.keep_newest", 3, {"base", "expert", "distilled"}),
        ("domains.arithmetic.levels", (1,), {"base", "expert", "distilled"}),
        ("models.student.remat", "full", {"base", "expert", "distilled"}),
        ("stages.base.steps", 1, {"base", "expert", "distilled"}),
        ("stages.expert.clip_low", 0.1, {"expert", "distilled"}),
        ("stages.distilled.steps", 2, {"distilled"}),
        ("models.wide.remat", "full", set()),
        ("stages.wide.steps", 1, set()),
        ("name", "other", set()),
        ("baseline", "", set()),
        ("routes.distilled", ("distilled",), set()),
        ("runtime.progress_seconds", 1.0, set()),
    ]:
        found = folders({path: value})
        assert {name for name in plain if found[name] != plain[name]} == changed, path


def test_the_order_of_domains_tells_stages_apart():
    """Rows of a batch stand in it, and with them their noise."""
    x = points.experiment(Point("x", "configs/sweeps/domain_counts.py:2,smoke", {}, 0))
    turned = dict(reversed(x.stages["joint"].domains.items()))
    other = dataclasses.replace(
        x, stages=x.stages | {"joint": dataclasses.replace(x.stages["joint"], domains=turned)}
    )
    a, b = points.stage_folders(x), points.stage_folders(other)
    assert [name for name in a if a[name] != b[name]] == ["joint"]


def test_a_task_vector_is_where_a_stage_starts_from():
    x = points.experiment(Point("x", "configs/quickstart.py", {}, 0))
    other = points.experiment(
        Point("x", "configs/quickstart.py", {"stages.expert_countdown.steps": 7}, 0)
    )
    teachers = {"arithmetic": "stage:expert_arithmetic", "countdown": "self"}
    # Reached through the vectors alone, or through teachers.
    for changes in ({"teachers": teachers}, {"task_vectors": {}}):
        a, b = (
            points.stage_folders(
                dataclasses.replace(
                    e,
                    stages=e.stages | {"merge": dataclasses.replace(e.stages["merge"], **changes)},
                )
            )
            for e in (x, other)
        )
        assert [name for name in a if a[name] != b[name]] == ["expert_countdown", "merge"]


def test_experts_of_the_first_domains_are_shared_between_domain_counts():
    two, four = (folders({}, file=f"configs/sweeps/domain_counts.py:{n},smoke") for n in (2, 4))
    same = {name for name in two if two[name] == four[name]}
    assert same == {"base", "expert_arithmetic", "expert_countdown"}


def test_links_lead_to_shared_folders_until_a_point_has_begun(tmp_path):
    first, second = (points.experiment(Point("x", FILE, o, 0)) for o in ({}, SELF))
    sweep.share_stages(first, str(tmp_path), "a")
    sweep.share_stages(second, str(tmp_path), "b")
    assert (tmp_path / "a" / "base").resolve() == (tmp_path / "b" / "base").resolve()
    assert (tmp_path / "a" / "distilled").resolve() != (tmp_path / "b" / "distilled").resolve()
    assert not os.path.isabs(os.readlink(tmp_path / "a" / "base"))  # The sweep can be moved.
    sweep.share_stages(second, str(tmp_path), "a")  # Not begun: the links follow the config.
    assert (tmp_path / "a" / "distilled").resolve() == (tmp_path / "b" / "distilled").resolve()
    (tmp_path / "a" / "plan.json").touch()
    sweep.share_stages(first, str(tmp_path), "a")  # Begun: nothing moves under its feet.
    assert (tmp_path / "a" / "distilled").resolve() == (tmp_path / "b" / "distilled").resolve()
    sweep.share_stages(first, "gs://bucket/sweep", "a")
    assert not pathlib.Path("gs:").exists()


# Running, with a made-up main.


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results.json of a made-up run."""
    root = synthetic_records.write(tmp_path_factory.mktemp("run"), problems=12)
    report.write(str(root))
    return json.loads((root / "results.json").read_text())


@pytest.fixture
def make_main(results, tmp_path):
    """Makes the stand-in for the test's workdir."""
    return functools.partial(Main, results, tmp_path)


class Main:
    """Stands in for opd_jax.main: finishes the points that it is not told to fail or to stop at."""

    def __init__(self, results, workdir, wanted, *, fails=(), stops=(), ends_early=()):
        self.ran = []
        self._results = results
        self._fails, self._stops, self._ends_early = fails, stops, ends_early
        self._points = {points.arguments(p, str(workdir))[-1]: p for p in wanted}

    def __call__(self, arguments, stop):
        point = self._points[arguments[-1]]
        self.ran.append(point.folder)
        if point.folder in self._fails:
            return "error: it broke (exit status 1)"
        if point.folder in self._stops:
            stop.request()
            return ""
        if point.folder not in self._ends_early:
            config_of_point = dataclasses.asdict(points.experiment(point))
            path = pathlib.Path(arguments[-1].removeprefix("--workdir="), "results.json")
            path.write_text(json.dumps(self._results | {"config": config_of_point}))
        return ""


WANTED = grid(FILE, {"expert": {}, "self": SELF}, (0, 1))


def statuses(workdir):
    records = json.loads((workdir / "sweep.json").read_text())
    return {pathlib.Path(r["workdir"]).name: (r["status"], r["error"]) for r in records}


def test_points_run_in_order_and_end_in_one_table(tmp_path, make_main):
    main = make_main(WANTED)
    table, failed = sweep.run(WANTED, str(tmp_path), main)
    assert main.ran == ["expert-seed0", "expert-seed1", "self-seed0", "self-seed1"]
    assert failed == []
    assert set(statuses(tmp_path).values()) == {("done", "")}
    rows = list(csv.DictReader((tmp_path / "sweep.csv").open()))
    assert {(r["name"], r["seeds"]) for r in rows} == {("expert", "2"), ("self", "2")}
    assert {"accuracy_mean", "flops_mean", "length_mean", "overlap_end_mean"} <= set(rows[0])
    assert "expert" in table
    assert "self" in (tmp_path / "sweep.html").read_text()


def test_finished_points_are_skipped_and_a_changed_one_is_not(tmp_path, make_main):
    sweep.run(WANTED[:2], str(tmp_path), make_main(WANTED))
    again = make_main(WANTED)
    sweep.run(WANTED, str(tmp_path), again)
    assert again.ran == ["self-seed0", "self-seed1"]
    changed = [dataclasses.replace(p, overrides={"stages.base.clip_low": 0.1}) for p in WANTED[:2]]
    refusing = make_main(changed, fails=("expert-seed0", "expert-seed1"))
    _, failed = sweep.run(changed, str(tmp_path), refusing)
    assert refusing.ran == failed == ["expert-seed0", "expert-seed1"]
    free = [dataclasses.replace(p, overrides={"runtime.progress_seconds": 1.0}) for p in WANTED[:2]]
    idle = make_main(free)
    sweep.run(free, str(tmp_path), idle)
    assert idle.ran == []


@pytest.mark.parametrize("damage", ["unfinished", "no_results", "cut"])
def test_a_point_that_is_not_whole_runs_again(tmp_path, make_main, damage):
    sweep.run(WANTED[:1], str(tmp_path), make_main(WANTED))
    path = tmp_path / "expert-seed0" / "results.json"
    if damage == "unfinished":
        path.write_text(json.dumps(json.loads(path.read_text()) | {"unfinished": ["distilled"]}))
    elif damage == "cut":
        path.write_text(path.read_text()[:100])
    else:
        path.unlink()
    again = make_main(WANTED)
    sweep.run(WANTED[:1], str(tmp_path), again)
    assert again.ran == ["expert-seed0"]


def test_a_failed_point_is_recorded_and_the_others_run(tmp_path, make_main):
    main = make_main(WANTED, fails=("expert-seed1",), ends_early=("self-seed0",))
    table, failed = sweep.run(WANTED, str(tmp_path), main)
    assert len(main.ran) == 4
    assert failed == ["expert-seed1", "self-seed0"]
    assert statuses(tmp_path) == {
        "expert-seed0": ("done", ""),
        "expert-seed1": ("failed", "error: it broke (exit status 1)"),
        "self-seed0": ("failed", "it ended before it was finished"),
        "self-seed1": ("done", ""),
    }
    assert "expert, seed 1 failed: error: it broke" in table
    rows = list(csv.DictReader((tmp_path / "sweep.csv").open()))
    assert {r["seeds"] for r in rows} == {"1"}


def test_a_stop_leaves_the_rest_for_the_next_start(tmp_path, make_main):
    main = make_main(WANTED, stops=("expert-seed1",))
    table, failed = sweep.run(WANTED, str(tmp_path), main)
    assert main.ran == ["expert-seed0", "expert-seed1"]
    assert failed == []
    assert [s for s, _ in statuses(tmp_path).values()] == ["done", "failed", "failed", "failed"]
    assert "self, seed 0 failed: stopped before it finished; start again" in table
    again = make_main(WANTED)
    sweep.run(WANTED, str(tmp_path), again)
    assert again.ran == ["expert-seed1", "self-seed0", "self-seed1"]


# The process of a point.


def fake_main(tmp_path, monkeypatch, code):
    """A package opd_jax whose main is `code`; child processes find it before the real one."""
    package = tmp_path / "fake" / "opd_jax"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "main.py").write_text(textwrap.dedent(code))
    monkeypatch.chdir(tmp_path / "fake")


def test_the_error_of_a_process_is_its_own_line_or_its_last(tmp_path, monkeypatch, capfd):
    code = """
        import os, sys
        kind = sys.argv[1]
        print("said", kind, flush=True)
        if kind == "well": sys.exit(0)
        if kind == "named": sys.exit("error: seed=x\\n  and more")
        if kind == "killed": os.kill(os.getpid(), 9)
        if kind == "jax":
            print("jax._src.core.ShardingTypeError: Got x\\n--------\\nFor simplicity, JAX has")
            sys.exit(1)
        raise KeyError(kind)
    """
    fake_main(tmp_path, monkeypatch, code)
    with StopSignal() as stop:
        kinds = ("well", "named", "killed", "jax", "raises")
        errors = {kind: sweep.run_process([kind], stop) for kind in kinds}
    assert errors == {
        "well": "",
        "named": "error: seed=x (exit status 1)",
        "killed": "said killed (exit status -9)",
        "jax": "jax._src.core.ShardingTypeError: Got x (exit status 1)",
        "raises": "KeyError: 'raises' (exit status 1)",
    }
    assert "said well" in capfd.readouterr().out


def test_a_signal_is_passed_on_once_and_waited_for(tmp_path, monkeypatch):
    code = """
        import os, pathlib, signal, sys, time
        count = 0
        def told(*_):
            global count
            count += 1
        signal.signal(signal.SIGTERM, told)
        os.kill(os.getppid(), signal.SIGTERM)
        while not count:
            time.sleep(0.01)
        time.sleep(0.7)
        pathlib.Path("told").write_text(str(count))
    """
    fake_main(tmp_path, monkeypatch, code)
    with StopSignal() as stop:
        assert sweep.run_process([], stop) == ""
        assert stop.requested
    assert pathlib.Path("told").read_text() == "1"


# The command line.


def command(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "opd_jax.sweep", *arguments],
        cwd=ROOT, capture_output=True, text=True, **options,
    )  # fmt: skip


def test_print_commands_prints_one_line_per_point_and_makes_nothing(tmp_path):
    workdir = tmp_path / "a b"
    done = command(f"--sweep={SWEEPS[0]}:smoke", f"--workdir={workdir}", "--print_commands")
    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert not workdir.exists()
    assert len(lines) == 7
    for line, point in zip(lines, teacher_types.get_sweep("smoke"), strict=True):
        assert line == ["python", "-m", "opd_jax.main", *points.arguments(point, str(workdir))]
    assert f"--workdir={workdir}/self-seed0" in lines[4]


def test_a_wrong_sweep_file_is_one_clear_error(tmp_path):
    done = command("--sweep=configs/sweeps/teachers.py", f"--workdir={tmp_path}")
    assert done.returncode == 1
    assert "error: 'configs/sweeps/teachers.py': there is no file" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow  # Three processes that compile: minutes.
def test_a_real_sweep_shares_the_base_survives_a_failure_and_resumes_after_a_stop(tmp_path):
    (tmp_path / "made.py").write_text(
        textwrap.dedent(f"""
            from opd_jax.points import grid

            SELF = {SELF}

            def get_sweep():
                free = {{
                    "runtime.data_dir": "{tmp_path}/data",
                    "runtime.compilation_cache": "{tmp_path}/cache",
                }}
                points = {{
                    "self": SELF | free,
                    "broken": SELF | free | {{"tokenizer": "nowhere.model"}},
                    "random": SELF | free | {{"stages.distilled.teachers.arithmetic": "random"}},
                }}
                return grid("{FILE}", points, (0,))
        """)
    )
    arguments = [f"--sweep={tmp_path}/made.py", f"--workdir={tmp_path}/run"]
    process = subprocess.Popen(
        [sys.executable, "-m", "opd_jax.sweep", *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    said = []
    for line in process.stdout:
        said.append(line)
        if line.startswith("base 1/"):
            process.send_signal(signal.SIGTERM)
            break
    said += process.communicate(timeout=300)[0]
    assert process.returncode == 0, "".join(said)
    assert statuses(tmp_path / "run")["self-seed0"][0] == "failed"
    done = command(*arguments, timeout=600)
    assert done.returncode == 1, done.stdout
    assert "error: these points failed, see the table: broken-seed0" in done.stderr
    found = statuses(tmp_path / "run")
    assert [found[f"{name}-seed0"][0] for name in ("self", "random")] == ["done", "done"]
    assert "tokenizer 'nowhere.model'" in found["broken-seed0"][1]
    # It was stopped after its first update or its second, and `random` found it trained.
    assert ("".join(said) + done.stdout).count("base 1/2") == 1
    rows = list(csv.DictReader((tmp_path / "run" / "sweep.csv").open()))
    assert [r["name"] for r in rows] == ["self", "random"]
    again = command(*arguments, timeout=300)
    assert "base 1/2" not in again.stdout
    assert again.returncode == 1
