"""Configs: parsing, the committed config files, the command line, and fields that nobody reads."""

import ast
import dataclasses
import importlib
import pathlib
import sys

import pytest
from absl import flags
from ml_collections import config_flags

from configs import base, smoke
from opd_jax import config, guards
from opd_jax.optim import OptimizerSettings
from opd_jax.rollout import Sampling

ROOT = pathlib.Path(__file__).parent.parent


def refused(changes, *needles, error=ValueError):
    """Parses the smoke config with some keys set; the message must hold all needles."""
    plain = smoke.get_config().to_dict()
    for path, value in changes.items():
        *parents, last = path.split(".")
        section = plain
        for key in parents:
            section = section[key]
        section[last] = value
    with pytest.raises(error) as caught:
        config.parse(plain)
    for needle in needles:
        assert needle in str(caught.value)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("sead", "seed"),
        ("evaluation.evry", "every"),
        ("stages.merge.promtps", "prompts"),
        ("stages.merge.optimizer.learning_rat", "learning_rate"),
        ("stages.merge.sampling.temprature", "temperature"),
        ("domains.program.level", "levels"),
        ("models.student.prest", "preset"),
    ],
)
def test_an_unknown_key_at_any_depth_is_named_with_the_nearest_known_one(path, hint):
    refused({path: 1}, f"config.{path}: unknown config key", f"did you mean {hint!r}?")


def test_an_unknown_key_like_no_other_lists_the_known_ones():
    refused({"checkpoint.zzz": 1}, "config.checkpoint.zzz", "known: every, keep_newest")


def test_a_missing_key_is_named():
    plain = smoke.get_config().to_dict()
    del plain["seed"], plain["stages"]["merge"]["init"]
    with pytest.raises(ValueError, match=r"config: missing config key\(s\) seed"):
        config.parse(plain)
    plain["seed"] = 0
    with pytest.raises(ValueError, match=r"config\.stages\.merge: missing config key\(s\) init"):
        config.parse(plain)


@pytest.mark.parametrize(
    ("path", "value", "wanted"),
    [
        ("seed", 1.0, "of type int"),
        ("seed", True, "of type int"),
        ("name", 3, "of type str"),
        ("stages.merge.mask_truncated", 1, "of type bool"),
        ("stages.merge.clip_low", "0.2", "a number"),
        ("stages.merge.clip_low", False, "a number"),
        ("stages.merge", 3, "a mapping"),
        ("stages", 3, "a mapping"),
        ("plan", "merge", "a tuple"),
        ("plan", ("merge", 3), "of type str"),
        ("domains.program.levels", (1, 2.0), "of type int"),
    ],
)
def test_a_wrong_type_names_field_and_value(path, value, wanted):
    offender = value[1] if isinstance(value, tuple) and len(value) > 1 else value
    refused({path: value}, f"config.{path}", f"={offender!r}", f"must be {wanted}")


def test_a_float_accepts_an_int_and_a_tuple_a_list():
    plain = smoke.get_config().to_dict()
    plain["stages"]["merge"]["clip_low"] = 1
    plain["prompt_buckets"] = [8, 24]
    x = config.parse(plain)
    assert x.stages["merge"].clip_low == 1.0
    assert isinstance(x.stages["merge"].clip_low, float)
    assert x.prompt_buckets == (8, 24)
    assert x.domains["program"].levels == (1, 2)
    assert hash(x.stages["merge"].sampling) == hash(Sampling(1, 10))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("stages.merge.algorithm", "odp"),
        ("stages.merge.steps", -1),
        ("stages.merge.micro_batches", 0),
        ("stages.merge.clip_low", -0.1),
        ("stages.merge.stop.select", "bset"),
        ("stages.merge.stop.patience", -1),
        ("stages.merge.sft.source", "teachers"),
        ("stages.merge.opd.loss", "kl"),
        ("stages.merge.opd.top_k", 0),
        ("stages.merge.opd.jsd_beta", 1.5),
        ("stages.merge.grpo.advantage_ddof", 2),
        ("stages.merge.grpo.kl_coefficient", -1.0),
        ("stages.merge.sampling.samples", 0),
        ("stages.merge.optimizer.schedule", "cosin"),
        ("stages.merge.domains", {}),
        ("evaluation.every", 0),
        ("evaluation.batch", 0),
        ("evaluation.test_problems", 0),
        ("evaluation.samples", 0),
        ("evaluation.top_p", 0.0),
        ("checkpoint.every", 0),
        ("checkpoint.keep_newest", 0),
        ("prompt_overflow", "cut"),
        ("prompt_buckets", ()),
        ("runtime.host_timeout", 0.0),
        ("runtime.coordinator", "host:1234"),  # Without multihost.
        ("runtime.process", 0),
    ],
)
def test_a_value_out_of_range_names_section_field_and_value(path, value):
    *parents, field = path.split(".")
    shown = "empty" if value == {} else repr(value)
    refused({path: value}, ".".join(["config", *parents]), field, shown)


def test_a_config_file_that_cannot_be_read_says_so_when_it_is_parsed():
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values)
    values(["main", "--config=configs/smoek.py"])
    with pytest.raises(OSError, match=r"configs/smoek\.py"):
        config.parse(values.config)


def config_files():
    return sorted(
        path.relative_to(ROOT)
        for path in (ROOT / "configs").rglob("*.py")
        if "def get_config(" in path.read_text()
    )


@pytest.mark.parametrize("path", config_files(), ids=str)
def test_every_config_file_builds_parses_and_passes_the_guards(path, tmp_path):
    get_config = importlib.import_module(".".join(path.with_suffix("").parts)).get_config
    if path.stem == "smollm2_gsm8k":  # It looks whether its assets have been fetched.
        (tmp_path / "SmolLM2-135M-Instruct").mkdir()
        (tmp_path / "gsm8k").mkdir()
        (tmp_path / "gsm8k" / "problems.jsonl").touch()
        built = get_config(str(tmp_path))
    else:
        built = get_config()
    x = config.parse(built)
    guards.check_experiment(x, 1)
    assert set(x.plan) <= set(x.stages)
    # Every field can be set on the command line: the file's sections are whole.
    for name, stage in x.stages.items():
        assert set(built.stages[name]) == {f.name for f in dataclasses.fields(stage)}


def test_builders_reject_unknown_fields_and_keep_the_order_of_stages():
    with pytest.raises(KeyError, match="promtps"):
        base.stage("sft", init="scratch", domains={"a": 1.0}, promtps=3)
    with pytest.raises(KeyError, match="learning_rat"):
        base.stage("sft", init="scratch", domains={"a": 1.0}, optimizer={"learning_rat": 1.0})
    stage = base.stage("sft", init="scratch", domains={"a": 1.0}, optimizer={"b2": 0.95})
    assert stage.optimizer.b2 == 0.95
    assert stage.optimizer.b1 == OptimizerSettings().b1
    built = base.experiment(
        "x", stages={"z": stage, "a": stage}, domains={"a": {"source": "logic"}}
    )
    assert built.plan == ("z", "a")
    assert built.models.student.preset == "nano"
    with pytest.raises(KeyError, match="sead"):
        base.experiment("x", stages={"z": stage}, domains={}, sead=1)


def test_command_line_overrides_reach_the_dataclasses(monkeypatch):
    arguments = [
        "main",
        "--config=configs/smoke.py",
        "--config.seed=3",
        "--config.stages.merge.sampling.temperature=0.5",
        "--config.stages.merge.optimizer.learning_rate=1",
        "--config.stages.merge.teachers.program=self",
        "--config.stages.merge.domains.program=1",
        "--config.stages.merge.mask_truncated=True",
        '--config.plan=("base", "expert_a", "merge",)',
        "--config.checkpoint.keep_steps=(2, 4)",
        "--config.runtime.progress_seconds=1",
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values)
    values(arguments)
    x = config.parse(values.config)
    merge = x.stages["merge"]
    assert (x.seed, x.plan) == (3, ("base", "expert_a", "merge"))
    assert x.checkpoint.keep_steps == (2, 4)
    assert merge.sampling.temperature == 0.5
    assert merge.optimizer.learning_rate == 1.0
    assert merge.teachers == {"arithmetic": "stage:expert_a", "program": "self"}
    assert merge.domains["program"] == 1.0
    assert merge.mask_truncated is True
    assert x.runtime.progress_seconds == 1.0


def sections():
    """Every dataclass that a config is made of."""
    own = [
        c
        for c in vars(config).values()
        if dataclasses.is_dataclass(c) and isinstance(c, type) and c.__module__ == config.__name__
    ]
    return [*own, Sampling, OptimizerSettings]


def unread(classes, trees):
    """Fields, "Class.name", that no tree reads: neither as `x.name` nor as `x["name"]`."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    read = {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
    read |= {
        n.slice.value
        for n in nodes
        if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Constant)
    }
    return [
        f"{c.__name__}.{f.name}"
        for c in classes
        for f in dataclasses.fields(c)
        if f.name not in read
    ]


def test_every_field_of_a_config_is_read_outside_of_the_config():
    paths = [
        p for p in (ROOT / "opd_jax").rglob("*.py") if p.name not in ("config.py", "guards.py")
    ]
    trees = [ast.parse(p.read_text()) for p in paths]
    # Unpacked as a whole: sharding.make_mesh(**asdict(mesh)).
    whole = {f"MeshSettings.{f.name}" for f in dataclasses.fields(config.MeshSettings)}
    assert set(unread(sections(), trees)) <= whole


def test_a_dead_field_is_found():
    """Negative control: a field that nothing reads, and one that is only written."""

    @dataclasses.dataclass(frozen=True)
    class Made:
        seed: int
        nobody_reads_this: int
        only_written: int

    tree = ast.parse("def f(x):\n    x.only_written = x.seed")
    assert unread([Made], [tree]) == ["Made.nobody_reads_this", "Made.only_written"]


def test_a_domains_path_template_and_options_reach_the_dataclasses():
    fields = {
        "source": "reasoning:chain_sum",
        "levels": (1, 2),
        "template": r"{prompt} Answer in \boxed{}.",
        "options": {"1": {"max_terms": 2, "min_terms": 2}, "all": {"max_digits": 1}},
    }
    plain = base.experiment(
        "x",
        domains={"a": fields},
        stages={"s": base.stage("grpo", init="scratch", domains={"a": 1.0})},
        chat={"template": "own", "thinking": "off"},
    )
    x = config.parse(plain)
    assert dataclasses.asdict(x.domains["a"]).items() >= fields.items()
    assert (x.chat.template, x.chat.thinking, x.chat.system) == ("own", "off", "")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("domains.arithmetic.template", "no place", "must hold {prompt} once"),
        ("domains.arithmetic.template", "{prompt}{prompt}", "must hold {prompt} once"),
        ("domains.arithmetic.near_duplicates", 1.5, "must be in [0, 1]"),
        ("domains.arithmetic.size", 0, "must be at least 1"),
        ("chat.thinking", "yes", "one of default, on, off"),
    ],
)
def test_bad_domain_and_chat_settings_are_named(path, value, message):
    section, _, field = path.rpartition(".")
    refused({path: value}, f"config.{section}: ", field, message)
