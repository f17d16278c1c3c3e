"""LoRA: a model with deltas, what is trained of it, who shares its base, and what it amounts to."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from safetensors.numpy import load_file

from configs import smoke
from opd_jax import config as config_lib
from opd_jax import guards, pipeline, steps, teachers
from opd_jax.config import LoraSettings, StopRule
from opd_jax.core import sharding, tree
from opd_jax.models import hf, lora, peft, transformer
from opd_jax.models.config import PROJECTIONS, Lora
from opd_jax.optim import OptimizerSettings
from tests import batches, tiny
from tools import export_hf

BASE = batches.CONFIG
ADAPTED = BASE.replace(lora=Lora(rank=3, alpha=6.0))


@functools.partial(jax.jit, static_argnums=1)
def run(params, config, rows):
    return transformer.completion_hidden(params, config, rows.prompt, rows.tokens_BR)


def hidden(params, config, mesh):
    return run(params, config, sharding.put(mesh, batches.host().rollout))


def adapted(mesh, config=ADAPTED):
    """A base and deltas that matter: what is 0 at first is not."""
    base, delta = lora.split(tiny.params(mesh, config))
    noise = np.random.default_rng(3)
    shifted = jax.tree.map(
        lambda x: jax.device_put(
            np.asarray(x) + 0.2 * noise.normal(size=x.shape).astype(np.float32), x.sharding
        ),
        delta,
    )
    return base, shifted


def test_a_fresh_delta_changes_nothing(mesh):
    base, _ = lora.split(tiny.params(mesh, ADAPTED))
    delta = steps.make_delta(ADAPTED, mesh)(jax.random.key(0))
    assert set(delta["layers"]) == {
        f"{target}{part}" for target in PROJECTIONS for part in (lora.A, lora.B)
    }
    want = hidden(base, BASE, mesh)
    np.testing.assert_array_equal(hidden(lora.join(base, delta), ADAPTED, mesh), want)
    # Control: one that has been trained changes it.
    trained = lora.join(*adapted(mesh))
    assert np.abs(hidden(trained, ADAPTED, mesh) - want).max() > 0.1


def test_one_projection_by_hand():
    """y = W x + (alpha / rank) B A x with W = 2, A = 3, B = 5, alpha / rank = 4: 62 for x = 1."""
    params = {"layers": {"gate": jnp.full((1, 1, 1), 2.0), "gate_lora_a": jnp.full((1, 1, 1), 3.0),
                         "gate_lora_b": jnp.full((1, 1, 1), 5.0)}}  # fmt: skip
    merged = lora.merge(params, BASE.replace(lora=Lora(1, 4.0, ("gate",))))
    assert merged["layers"]["gate"].item() == 62


@pytest.mark.parametrize("targets", [PROJECTIONS, ("q", "down"), ("o",)])
def test_merged_weights_give_the_same_outputs(mesh, targets):
    config = BASE.replace(lora=Lora(rank=3, alpha=6.0, targets=targets))
    params = lora.join(*adapted(mesh, config))
    merged = steps.make_merge(config)(params)
    tree.check_same(tiny.params(mesh, BASE), merged, "a merged model has the base's tree")
    np.testing.assert_allclose(
        hidden(merged, BASE, mesh), hidden(params, config, mesh), rtol=0, atol=2e-5
    )
    # Control: merged at another alpha.
    other = dataclasses.replace(config, lora=dataclasses.replace(config.lora, alpha=7.0))
    assert np.abs(hidden(lora.merge(params, other), BASE, mesh)
                  - hidden(params, config, mesh)).max() > 1e-3  # fmt: skip


def update(config=ADAPTED, micro_batches=1):
    optimizer = OptimizerSettings(learning_rate=1e-2)
    loss = batches.settings("supervised")
    return steps.make_update_step(config, optimizer, 4, loss, micro_batches)


def state_of(params):
    return steps.make_state(OptimizerSettings(learning_rate=1e-2), 4)(params)


def group(mesh):
    bare = dataclasses.replace(batches.host(), teacher=None, teacher_hidden_BRD=None)
    return batches.put(mesh, bare)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_an_update_trains_the_deltas_alone(mesh, micro_batches):
    base, delta = adapted(mesh)
    before = jax.tree.map(np.asarray, base)
    state, metrics = update(micro_batches=micro_batches)(state_of(delta), [group(mesh)], base)
    tree.check_same(before, base, "the base was changed", values=True)
    moved = jax.tree.map(lambda x, y: float(np.abs(x - y).max()), delta, state.params)
    assert min(jax.tree.leaves(moved)) > 1e-4
    tree.check_same(delta, state.params, "the state holds deltas")
    assert tree.count(state.opt_state) == 2 * tree.count(delta) + 2  # Moments, and two counters.
    assert metrics["finite"].shape == (len(jax.tree.leaves(delta)),)


def test_the_gradient_is_the_merged_models_by_the_chain_rule(mesh):
    """dA = s dW B^T and dB = s A^T dW, dW being the gradient of the merged model's weight."""
    base, delta = adapted(mesh)
    params, scale = lora.join(base, delta), ADAPTED.lora.scale

    rows = sharding.put(mesh, batches.host().rollout)

    def loss(params, config):
        return jnp.sum(jnp.sin(run(params, config, rows)))

    got = jax.grad(loss)(params, ADAPTED)["layers"]
    whole = jax.grad(loss)(lora.merge(params, ADAPTED), BASE)["layers"]
    a, b = delta["layers"]["down_lora_a"], delta["layers"]["down_lora_b"]
    want_a = scale * np.einsum("nfd,nrd->nfr", whole["down"], b)
    want_b = scale * np.einsum("nfr,nfd->nrd", a, whole["down"])
    np.testing.assert_allclose(got["down_lora_a"], want_a, atol=1e-4)
    np.testing.assert_allclose(got["down_lora_b"], want_b, atol=1e-4)
    assert np.abs(want_a).max() > 1e-2  # Control: there is something to compare.


def test_eight_devices_give_the_same(mesh, mesh_2x2x2):
    with jax.set_mesh(mesh):
        base, delta = adapted(mesh)
        one, _ = update()(state_of(delta), [group(mesh)], base)
        one = jax.tree.map(np.asarray, one.params)
    base, delta = adapted(mesh_2x2x2)
    eight, _ = update()(state_of(delta), [group(mesh_2x2x2)], base)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), one, eight.params)
    layers = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, eight.params["layers"])
    assert layers["q_lora_a"] == jax.P(None, "fsdp", None)
    assert layers["down_lora_b"] == jax.P(None, None, "fsdp")
    merged = steps.make_merge(ADAPTED)(lora.join(base, eight.params))
    assert jax.typeof(merged["layers"]["q"]).sharding.spec == jax.P(None, "fsdp", "tensor", None)


def test_settings_name_what_is_wrong():
    for changes, message in [
        ({"rank": -1}, r"lora\.rank=-1: must be at least 0"),
        ({"rank": 2, "alpha": 0.0}, r"lora\.alpha=0.0: must be positive"),
        ({"rank": 2, "targets": ("q", "query")}, r"lora\.targets=.*: at least one of q, k, v"),
        ({"rank": 2, "targets": ()}, r"lora\.targets=\(\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            LoraSettings(**changes)
    assert LoraSettings().deltas() is None


def test_an_adapter_file_holds_the_same_product(mesh, tmp_path):
    """W_merged - W = (alpha / rank) B A as the file lies: B `[out, r]`, A `[r, in]`."""
    base, delta = adapted(mesh)
    merged = lora.merge(lora.join(base, delta), ADAPTED)
    peft.save_adapter(delta, ADAPTED, tmp_path, "base")
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    rows = [row for row in hf.TABLE if row.path[-1] in PROJECTIONS]
    assert len(tensors) == 2 * len(rows) * ADAPTED.num_layers
    for row in rows:
        leaf = row.path[-1]
        for n, name in enumerate(row.names(ADAPTED)):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            a, b = (tensors[f"{stem}.lora_{part}.weight"] for part in "AB")
            w, want = (row.to_file(np.asarray(x["layers"][leaf][n])) for x in (base, merged))
            got = w + ADAPTED.lora.scale * b @ a
            np.testing.assert_allclose(got, want, atol=1e-5)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["bias"]) == (3, 6.0, "none")
    assert set(config["target_modules"]) == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    with pytest.raises(FileExistsError, match="is not empty"):
        peft.save_adapter(delta, ADAPTED, tmp_path, "base")


def test_the_student_itself_as_teacher_has_its_deltas(mesh, tmp_path):
    """Without them the control `self` would be the base, and pull the student back to it."""
    x = config_lib.parse(smoke.get_config())
    merge = dataclasses.replace(
        x.stages["merge"],
        lora=LoraSettings(rank=3, alpha=6.0),
        teachers=dict.fromkeys(x.stages["merge"].domains, "self"),
    )
    x = dataclasses.replace(x, stages=x.stages | {"merge": merge})
    weights = teachers.Weights(x, epath.Path(tmp_path), mesh, {"student": BASE})
    found = weights.teachers("merge")
    assert {t.config for t in found.values()} == {ADAPTED}
    # Control: what a teacher without deltas would say of a student that has some.
    params = lora.join(*adapted(mesh))
    gap = np.abs(hidden(params, ADAPTED, mesh) - hidden(params, BASE, mesh)).max()
    assert gap > 0.1


# In the pipeline.


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """base, two LoRA experts on it, a LoRA student taught by both; then one that trains all."""
    x = config_lib.parse(smoke.get_config())
    rank = LoraSettings(rank=2, alpha=4.0)
    stages = dict(x.stages)
    for name in ("expert_p", "merge"):
        stages[name] = dataclasses.replace(stages[name], lora=rank, steps=2)
    # By solutions, which teach something in two updates; rewards of the base are 0.
    stages["expert_a"] = dataclasses.replace(
        stages["base"],
        init="stage:base",
        domains={"arithmetic": 1.0},
        lora=rank,
        steps=2,
        stop=StopRule(select="last"),
    )
    stages["joint"] = dataclasses.replace(stages["joint"], init="stage:expert_a", steps=2)
    data_dir = str(tmp_path_factory.mktemp("tfds"))
    return dataclasses.replace(
        x,
        stages=stages,
        plan=("base", "expert_a", "expert_p", "merge", "joint"),
        runtime=dataclasses.replace(x.runtime, data_dir=data_dir),
    )


def test_random_weights_are_not_frozen(experiment):
    stages = experiment.stages | {
        "base": dataclasses.replace(experiment.stages["base"], lora=LoraSettings(rank=2))
    }
    with pytest.raises(ValueError, match=r"stages\.base\.lora\.rank=2 with init='scratch'"):
        guards.check_experiment(dataclasses.replace(experiment, stages=stages), 1)


@pytest.mark.slow
def test_experts_are_deltas_on_one_base_through_the_pipeline(experiment, tmp_path, mesh):
    pipeline.run(experiment, tmp_path, devices=jax.devices()[:1])
    models = {name: teachers.model_config(m, 320) for name, m in experiment.models.items()}
    weights = teachers.Weights(experiment, epath.Path(tmp_path), mesh, models)
    found = weights.teachers("merge")
    first, second = (found[d].params for d in ("arithmetic", "program"))
    base_leaves = jax.tree.leaves(lora.split(first)[0])
    shared = jax.tree.leaves(lora.split(second)[0])
    assert all(x is y for x, y in zip(base_leaves, shared, strict=True))
    _, student_base = weights.initial("merge")
    assert all(x is y for x, y in zip(base_leaves, jax.tree.leaves(student_base), strict=True))
    # The base is what the stage `base` selected, the deltas are what the checkpoint holds.
    whole, _ = weights.initial("expert_a")
    assert set(whole) == {"layers"}
    start, none = weights.initial("joint")
    assert none is None
    assert not any(lora.is_delta(name) for name in start["layers"])
    merged = lora.merge(first, weights.config("expert_a"))
    tree.check_same(merged, start, "stage:expert_a as init is its merged model", values=True)
    gap = np.abs(np.asarray(start["layers"]["q"]) - np.asarray(student_base["layers"]["q"])).max()
    assert 0 < gap < 0.1
    with pytest.raises(ValueError, match="LoRA deltas without their base; merge them with"):
        teachers.saved_config(str(tmp_path / "expert_a" / "checkpoints"), None)
    # What is exported is the merged model.
    export_hf.export_stage(tmp_path / "expert_a", tmp_path / "hf")
    exported = hf.load_params(tmp_path / "hf", hf.read_config(tmp_path / "hf"))
    tree.check_same(exported, jax.tree.map(jnp.asarray, start), "export", values=True)
    export_hf.export_adapter(tmp_path / "expert_a", tmp_path / "peft")
    assert (tmp_path / "peft" / "adapter_model.safetensors").exists()
    with pytest.raises(ValueError, match="base has no LoRA deltas"):
        export_hf.export_adapter(tmp_path / "base", tmp_path / "none")
