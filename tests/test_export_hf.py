"""The export tool, from a stage's checkpoints to a folder that imports."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opd_jax.core import tree
from opd_jax.infra.checkpoint import Checkpointer, CheckpointError
from opd_jax.models import hf, transformer
from opd_jax.models.config import preset
from tools import export_hf

CONFIG = preset("nano", 40)


def make_params(seed):
    """Random parameters, by numpy: no compilation."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: transformer.init(CONFIG, jax.random.key(0)))
    return jax.tree.map(lambda s: jnp.asarray(rng.standard_normal(s.shape), s.dtype), shapes)


@pytest.fixture
def stages(tmp_path):
    """A workdir with one finished stage: parameters by step, and the stage's folder."""
    source = tmp_path / "source"
    params = {step: make_params(step) for step in (10, 20)}
    hf.save_params(params[10], CONFIG, source)
    (source / "tokenizer.json").write_text("{}")
    stage = tmp_path / "run" / "merge"
    with Checkpointer(stage / "checkpoints", keep_newest=2) as checkpointer:
        for step, tree_ in params.items():
            checkpointer.save(step, {"params": tree_}, {"model": dataclasses.asdict(CONFIG)})
    config = {
        "models": {"student": {"hf": str(source)}, "other": {"hf": ""}},
        "stages": {"merge": {"model": "student"}},
    }
    (tmp_path / "run" / "plan.json").write_text(json.dumps({"config": config}))
    return params, stage


def test_the_selected_step_is_exported_with_its_tokenizer(tmp_path, stages):
    params, stage = stages
    (stage / "result.json").write_text('{"selected_step": 10}')
    assert export_hf.export_stage(stage, tmp_path / "out") == 10
    assert hf.read_config(tmp_path / "out") == CONFIG
    loaded = hf.load_params(tmp_path / "out", CONFIG)
    tree.check_same(params[10], loaded, "exported", values=True)
    assert tree.differences(params[20], loaded, values=True)
    assert (tmp_path / "out/tokenizer.json").exists()


def test_an_unfinished_stage_needs_a_step(tmp_path, stages):
    params, stage = stages
    with pytest.raises(ValueError, match="'merge' has not finished"):
        export_hf.export_stage(stage, tmp_path / "out")
    with pytest.raises(CheckpointError, match="30"):
        export_hf.export_stage(stage, tmp_path / "out", step=30)
    assert not (tmp_path / "out").exists()
    export_hf.export_stage(stage, tmp_path / "out", step=20, dtype="bfloat16")
    rounded = tree.cast(tree.cast(params[20], "bfloat16"), "float32")
    tree.check_same(rounded, hf.load_params(tmp_path / "out", CONFIG), "exported", values=True)


def test_a_preset_needs_no_source(tmp_path, stages):
    _, stage = stages
    plan = json.loads((stage.parent / "plan.json").read_text())
    plan["config"]["stages"]["merge"]["model"] = "other"
    (stage.parent / "plan.json").write_text(json.dumps(plan))
    export_hf.export_stage(stage, tmp_path / "out", step=20)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_the_read_back_sees_a_changed_weight(tmp_path, monkeypatch, stages):
    params, _ = stages
    load = hf.load_params

    def damaged(*args):
        loaded = load(*args)
        return loaded | {"final_norm": np.nextafter(loaded["final_norm"], np.float32(2))}

    monkeypatch.setattr(hf, "load_params", damaged)
    with pytest.raises(ValueError, match=r"\['final_norm'\]: values differ"):
        export_hf.export(params[10], CONFIG, None, tmp_path / "out")
