"""tools/aot: its programs and figures on CPU devices; and, with libtpu installed, on a TPU's.

The slow tests compile a small config for 16 chips of v5e. Each thing that they assert is seen to
fail on a variant that is bad in just that way.
"""

import dataclasses
import importlib
import importlib.util
import math

import jax
import jax.numpy as jnp
import pytest
from absl import flags
from absl.testing import flagsaver

from configs import base, smoke
from opd_jax import config, guards, ledger, scoring, steps
from opd_jax.core import sharding
from opd_jax.models.config import PRESETS
from tools import aot, hlo, hlo_cost, programs, published

CONFIGS = ("qwen3_1p7b_math_code", "qwen3_8b_teachers", "qwen3_4b_four_domains")
TOPOLOGY = "v5e:4x4"
# Sizes of which no product is another's, so that an array's size says what it is.
MODEL = {"embed_dim": 256, "num_layers": 2, "num_heads": 8, "num_kv_heads": 4, "head_dim": 128,
         "mlp_dim": 640, "max_length": 512}  # fmt: skip
VOCAB, P, L, N, R = 10_240, 16, 96, 4, 136

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: pip install -e '.[aot,test]' in an environment of its own",
)


def small(monkeypatch, **changes):
    """expert (GRPO with a reference) and merge (the expert and `self` teach) on a small model."""
    monkeypatch.setitem(PRESETS, "aot_test", MODEL)
    monkeypatch.setattr(programs, "vocabulary", lambda x: VOCAB)
    a, b = "arithmetic", "countdown"
    common = {"prompts": P, "sampling": {"samples": N, "max_new_tokens": R}} | changes
    stages = {
        "expert": base.stage(
            "grpo", init="hf:x", domains={a: 1.0}, grpo={"kl_coefficient": 0.01}, **common
        ),
        "merge": base.stage(
            "opd",
            init="hf:x",
            domains={a: 0.5, b: 0.5},
            teachers={a: "stage:expert", b: "self"},
            **common,
        ),
    }
    model = {"preset": "aot_test", "dtype": "bfloat16", "remat": "full"}
    return config.parse(
        base.experiment(
            "small",
            models={"student": model},
            domains={a: {"source": a}, b: {"source": b}},
            stages=stages,
            prompt_buckets=(L,),
            evaluation={"batch": P},
            mesh={"data": 1, "fsdp": 4, "tensor": 4},
        )
    )


# Without a TPU's compiler.


@pytest.mark.parametrize("name", CONFIGS)
def test_a_pods_config_is_sound_without_its_weights(name):
    experiment = config.parse(importlib.import_module(f"configs.{name}").get_config("/nowhere"))
    guards.check_experiment(experiment, batch_shards=experiment.mesh.fsdp)
    for model in experiment.models.values():
        assert programs.model_config(model, lambda: 0).vocab_size == 151_936


def test_a_config_that_does_not_divide_is_refused():
    experiment = config.parse(
        importlib.import_module("configs.qwen3_1p7b_math_code").get_config("/nowhere")
    )
    with pytest.raises(ValueError, match="does not divide into 4 micro-batch"):
        guards.check_experiment(experiment, batch_shards=64)


@pytest.mark.parametrize(
    ("name", "billions"), [("Qwen3-0.6B", 0.596), ("Qwen3-1.7B", 1.72), ("Qwen3-8B", 8.19)]
)
def test_published_shapes_have_the_published_number_of_parameters(name, billions, mesh):
    shapes = programs.parameters(published.MODELS[name], mesh)
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
    assert count / 1e9 == pytest.approx(billions, rel=5e-3)


def test_a_models_own_config_goes_before_the_published_one(tmp_path):
    with pytest.raises(ValueError, match=r"none of Qwen3-0\.6B.*weights are not needed"):
        programs.published_config(str(tmp_path / "Mine"))
    assert programs.published_config("/nowhere/Qwen3-8B").embed_dim == 4096
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="architectures"):
        programs.published_config(str(folder))


def test_every_stage_becomes_its_steps(mesh_2x2x2):
    found = programs.of_experiment(config.parse(smoke.get_config()), mesh_2x2x2)
    kinds = {(p.kind, stage) for p in found for stage in p.stages}
    assert {kind for kind, stage in kinds if stage == "base"} == {"update", "evaluate"}
    assert {kind for kind, stage in kinds if stage == "joint"} == {"rollout", "update", "evaluate"}
    assert {kind for kind, stage in kinds if stage == "merge"} == {
        "rollout", "score", "update", "evaluate",
    }  # fmt: skip
    shared = next(p for p in found if p.kind == "update" and "expert_a" in p.stages)
    assert "expert_p" in shared.stages  # Alike: compiled once.


def test_flops_are_the_ledgers_and_fit_is_by_all_that_is_held(mesh_2x2x2, monkeypatch):
    """On CPU devices: the same figures as on a TPU's, where the compiler leaves matmuls as dots."""
    x = small(monkeypatch)
    found = {p.title: p for p in programs.of_experiment(x, mesh_2x2x2)}
    program = next(p for p in found.values() if p.title == "score: reference")
    outcome, _ = aot.outcome_of(program, published.CHIPS["v5e"], aot.lower(program))
    assert outcome.fits
    assert not outcome.unbounded_loops
    # What the ledger leaves out: of causal attention the masked half.
    assert 1 < outcome.flops / outcome.ledger_flops < 1.3
    full = dataclasses.replace(outcome, held_bytes=outcome.limit_bytes)
    assert not full.fits
    assert "DOES NOT FIT" in aot.report(full)
    assert "fits" in aot.report(outcome)
    assert aot.as_json(full)["fits"] is False


def test_a_held_teacher_counts(mesh_2x2x2, monkeypatch):
    """While the student samples, its moments and its teacher stay on the device."""
    x = small(monkeypatch)
    model = programs.model_config(x.models["student"], lambda: VOCAB)
    params = programs.parameters(model, mesh_2x2x2)
    size = programs.device_bytes(params)
    rollout = next(
        p for p in programs.of_experiment(x, mesh_2x2x2) if p.title.startswith("rollout")
    )
    assert rollout.stages == ("expert", "merge")
    # Two moments and a reference in fp32, the larger of the two stages; counts are scalars.
    assert rollout.held_bytes == pytest.approx(3 * size, abs=64)


@pytest.mark.parametrize("topology", ["v9:4x4", "8x8"])
def test_an_unknown_topology_is_refused(topology):
    with pytest.raises(ValueError, match=f"topology='{topology}': one of v5e, v5p"):
        aot.topology_mesh(topology, config.MeshSettings())


# With it.


@pytest.fixture
def pod(monkeypatch):
    """The small experiment and a mesh of 16 chips in context; nothing compiled is kept."""
    # conftest.py turns them off for the whole suite; here they are what is looked at.
    jax.config.update("jax_disable_most_optimizations", False)
    experiment = small(monkeypatch)
    tpu = aot.topology_mesh(TOPOLOGY, experiment.mesh)
    clear()
    with jax.set_mesh(tpu):
        yield experiment, tpu
    clear()
    jax.config.update("jax_disable_most_optimizations", True)


def clear():
    for make in (steps.make_rollout_step, steps.make_score_step, steps.make_update_step):
        make.cache_clear()
    jax.clear_caches()


def program(experiment, tpu, kind, stage="expert"):
    found = programs.of_experiment(experiment, tpu)
    return next(p for p in found if p.kind == kind and stage in p.stages)


def module_of(p):
    return hlo.parse(aot.lower(p).compile().as_text())


def logits_gathered(module):
    """Collectives whose result is as large as one column's logits of a chip's rows, and has V."""
    rows = P * N // 4
    return [
        c
        for c in hlo_cost.collectives(module)
        for array in c.arrays
        if VOCAB in array.dims and math.prod(array.dims) >= rows * VOCAB
        # The table itself, gathered along its width, is no logits.
        if math.prod(array.dims) not in (VOCAB * 256, VOCAB // 4 * 256)
    ]


def whole_logits(module):
    """Arrays as large as `[B, R, V]` of a chip's share of rows and of the vocabulary."""
    size = P * N // 4 * R * VOCAB // 4
    return [
        i.name
        for computation in module.computations.values()
        for i in computation.values()
        for array in i.arrays
        if math.prod(array.dims) >= size
    ]


@pytest.mark.slow
@needs_libtpu
def test_no_logits_are_gathered_and_never_all_are_there(pod, monkeypatch):
    experiment, tpu = pod
    monkeypatch.setattr(scoring, "TILE_BYTES", 2**21)
    monkeypatch.setattr(scoring, "MIN_TILE_ROWS", 16)
    for kind in ("score", "update"):
        module = module_of(program(experiment, tpu, kind))
        assert logits_gathered(module) == []
        assert whole_logits(module) == []


@pytest.mark.slow
@needs_libtpu
def test_gathered_logits_would_be_found(pod, monkeypatch):
    experiment, tpu = pod
    plain = scoring.logits

    def gathered(*args, **kwargs):
        z = jax.sharding.reshard(plain(*args, **kwargs), sharding.spec("batch", "time", None))
        z += jnp.cumsum(z, axis=-1) * 1e-9  # It needs the vocabulary in one place.
        return jax.sharding.reshard(z, sharding.spec("batch", "time", "vocab"))

    monkeypatch.setattr(scoring, "logits", gathered)
    monkeypatch.setattr(scoring, "MIN_TILE_ROWS", 10**6)
    monkeypatch.setattr(scoring, "MAX_TILE_ROWS", 10**6)
    module = module_of(program(experiment, tpu, "score"))
    assert logits_gathered(module) != []
    assert whole_logits(module) != []


def replicated(shapes, shardings):
    """Matrices that every device holds whole; the gains of norms are meant to be."""
    pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    return [x.shape for x, s in pairs if x.size > 10_000 and s.is_fully_replicated]


@pytest.mark.slow
@needs_libtpu
def test_the_optimizers_state_is_sharded_like_the_parameters(pod):
    experiment, tpu = pod
    update = program(experiment, tpu, "update")
    compiled = aot.lower(update).compile()
    state, groups, base = update.arguments
    for found in (compiled.input_shardings[0][0], compiled.output_shardings[0]):
        assert replicated(state.opt_state, found.opt_state) == []
    sharded = compiled.memory_analysis().argument_size_in_bytes

    def whole(x):
        layout = jax.sharding.NamedSharding(tpu, jax.sharding.PartitionSpec(*(None,) * x.ndim))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)

    bad = state.replace(opt_state=jax.tree.map(whole, state.opt_state))
    compiled = update.step.lower(bad, groups, base).compile()
    assert replicated(state.opt_state, compiled.input_shardings[0][0].opt_state) != []
    moments = sum(math.prod(x.shape) * 4 for x in jax.tree.leaves(state.opt_state))
    assert compiled.memory_analysis().argument_size_in_bytes - sharded > moments / 2


def gathered_per_token(module):
    """Elements that the decode loop gathers for every token."""
    return sum(
        math.prod(array.dims)
        for c in hlo_cost.collectives(module)
        for array in c.arrays
        if c.kind == "all-gather" and c.times == R - 1
    )


@pytest.mark.slow
@needs_libtpu
def test_decoding_gathers_no_weights_in_its_loop(pod, monkeypatch):
    experiment, tpu = pod
    rollout = program(experiment, tpu, "rollout")
    share = sum(math.prod(x.shape) for x in jax.tree.leaves(rollout.arguments[0])) // 4
    assert gathered_per_token(module_of(rollout)) < share / 50
    clear()
    monkeypatch.setattr(sharding, "gathered", lambda tree: tree)
    assert gathered_per_token(module_of(program(experiment, tpu, "rollout"))) > share / 2


def cache_arrays(module):
    """Elements of the arrays that the decode loop carries and that have the cache's columns."""
    loops = [e.instruction for e in hlo_cost.executed(module) if e.instruction.opcode == "while"]
    decode = max(loops, key=lambda i: hlo.trip_count(module, i) or 0)
    assert hlo.trip_count(module, decode) == R - 1
    return {math.prod(a.dims) for a in decode.arrays if R - 1 in a.dims and 128 in a.dims}


@pytest.mark.slow
@needs_libtpu
def test_the_cache_of_keys_and_values_is_sharded_over_all_chips(pod, monkeypatch):
    experiment, tpu = pod
    one_chips = P * N * 4 * (R - 1) * 128 // 16
    assert cache_arrays(module_of(program(experiment, tpu, "rollout"))) == {one_chips}
    clear()
    monkeypatch.setitem(sharding.RULES, "kv_heads", None)
    assert max(cache_arrays(module_of(program(experiment, tpu, "rollout")))) == 4 * one_chips


@pytest.mark.slow
@needs_libtpu
def test_memory_stays_under_the_chips_and_what_is_too_large_is_said_to_be(pod, monkeypatch):
    experiment, tpu = pod
    chip = published.chip_of(TOPOLOGY)
    for kind in ("rollout", "score", "update"):
        p = program(experiment, tpu, kind)
        outcome, _ = aot.outcome_of(p, chip, aot.lower(p))
        assert outcome.fits
        assert outcome.total_bytes < 2**30
        # Masked products, and logits that the backward pass computes again, are in neither.
        assert 0.9 < outcome.flops / (outcome.ledger_flops + outcome.remat_flops) < 1.5
        assert 0 < outcome.mfu < 1
    clear()
    large = small(monkeypatch, prompts=64 * P, sampling={"samples": 64, "max_new_tokens": 400})
    p = program(large, tpu, "score")
    outcome, _ = aot.outcome_of(p, chip, aot.lower(p))
    assert not outcome.fits
    assert "exceeds available HBM (15.75G)" in outcome.error


@pytest.mark.slow
@needs_libtpu
def test_the_command_writes_its_figures_and_exits_with_1_if_something_does_not_fit(
    pod, monkeypatch, tmp_path, capsys
):
    experiment, _ = pod
    monkeypatch.setattr(config, "parse", lambda _: experiment)
    flags.FLAGS(["aot"])
    chosen = {"topology": TOPOLOGY, "json": str(tmp_path / "out.json"), "only": "score: reference"}
    with flagsaver.flagsaver(**chosen):
        aot.main([])
        tiny = dataclasses.replace(published.CHIPS["v5e"], hbm_gib=0.001)
        monkeypatch.setitem(published.CHIPS, "v5e", tiny)
        with pytest.raises(SystemExit, match="1"):
            aot.main([])
    assert (tmp_path / "out.json").exists()
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_the_ledgers_share_of_a_teachers_head_is_not_lost(mesh_2x2x2, monkeypatch):
    """A teacher leaves its unembedding to the update; together they are its whole score."""
    x = small(monkeypatch)
    found = programs.of_experiment(x, mesh_2x2x2)
    model = programs.model_config(x.models["student"], lambda: VOCAB)
    scores = [p for p in found if p.kind == "score" and "merge" in p.stages]
    (update,) = (p for p in found if p.kind == "update" and "merge" in p.stages)
    rows = programs.full_lengths(scores[0].arguments[1].prompt, x.stages["merge"].sampling)
    taught = sum(p.flops for p in scores) + update.flops - 3 * ledger.score(model, *both(rows))
    assert taught == pytest.approx(ledger.score(model, *both(rows)))


def both(rows):
    """The lengths of two equal halves together."""
    return tuple(jnp.concatenate([x, x]) for x in rows)
