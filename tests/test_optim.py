"""The optimizer: schedules by hand, precision of weights and moments, clipping."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from opd_jax.optim import SCHEDULES, OptimizerSettings, budget, learning_rate, make_optimizer


def rates(steps=11, **options):
    schedule = learning_rate(OptimizerSettings(learning_rate=1.0, **options), steps)
    return [float(schedule(i)) for i in range(steps)]


def test_schedules_by_hand():
    np.testing.assert_allclose(rates(), np.ones(11))
    np.testing.assert_allclose(
        rates(schedule="linear", final_fraction=0.5), np.linspace(1, 0.5, 11), rtol=1e-6
    )
    cosine = rates(schedule="cosine", final_fraction=0.2)
    np.testing.assert_allclose(cosine[5], 0.6, rtol=1e-6)
    for schedule in ("linear", "cosine"):
        for warmup in (0, 4):
            got = rates(schedule=schedule, final_fraction=0.2, warmup_steps=warmup)
            assert got[warmup] == pytest.approx(1)
            assert got[-1] == pytest.approx(0.2)  # At the last update, not one after it.
            assert (np.diff(got[warmup:]) < 0).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_only_a_decay_needs_to_know_the_budget(schedule):
    s = OptimizerSettings(schedule=schedule, warmup_steps=3)
    rate, short = learning_rate(s, 20), learning_rate(s, budget(s, 20))
    np.testing.assert_array_equal([rate(i) for i in range(20)], [short(i) for i in range(20)])
    same = budget(s, 20) == budget(s, 40)
    assert same == (schedule == "constant")
    assert same == all(learning_rate(s, 40)(i) == rate(i) for i in range(20))


def test_warmup_starts_above_zero_and_ends_at_the_full_rate():
    got = rates(warmup_steps=4)
    np.testing.assert_allclose(got, [0.2, 0.4, 0.6, 0.8, *[1] * 7], rtol=1e-6)


def test_a_warmup_longer_than_the_stage_is_no_error():
    np.testing.assert_allclose(rates(steps=2, warmup_steps=4, schedule="cosine"), [0.2, 0.4])


def after(updates, gradient, params, **options):
    """Parameters and optimizer state after a number of updates with one constant gradient."""
    tx = make_optimizer(OptimizerSettings(**options), updates)

    def update(carry, _):
        params, state = carry
        changes, state = tx.update(gradient, state, params)
        return (optax.apply_updates(params, changes), state), None

    run = jax.jit(lambda p: jax.lax.scan(update, (p, tx.init(p)), length=updates)[0])
    return run(params)


def test_n26_a_thousand_tiny_updates_add_up():
    options = {"learning_rate": 1e-6, "clip_norm": 0.0}
    w, _ = after(1000, {"w": jnp.ones(1)}, {"w": jnp.ones(1)}, **options)
    assert float(w["w"][0]) == pytest.approx(0.999, abs=2e-5)
    # Control: weights in bfloat16 never move.
    half = {"w": jnp.ones(1, jnp.bfloat16)}
    stuck, _ = after(1000, half, half, **options)
    assert float(stuck["w"][0]) == 1


def test_n27_second_moments_decay():
    tx = optax.scale_by_adam(b2=0.999)
    zero, params = {"w": jnp.zeros(1)}, {"w": jnp.ones(1)}

    def decayed(dtype):
        state = tx.init(params)._replace(nu={"w": jnp.full(1, 1e-4, dtype)})

        def step(state, _):
            state = tx.update(zero, state)[1]
            return state._replace(nu=optax.tree.cast(state.nu, dtype)), None

        return float(jax.jit(lambda s: jax.lax.scan(step, s, length=1000)[0])(state).nu["w"][0])

    assert decayed(jnp.float32) == pytest.approx(3.677e-5, rel=1e-3)
    assert decayed(jnp.bfloat16) == pytest.approx(1e-4, rel=1e-2)  # Control.
    state = make_optimizer(OptimizerSettings(), 3).init(params)
    moments = [x.dtype for x in jax.tree.leaves(state) if x.ndim]
    assert moments == [jnp.float32] * 2


@functools.cache
def first_update(**options):
    grads = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    tx = make_optimizer(OptimizerSettings(learning_rate=1.0, eps=1.0, **options), 1)
    params = jax.tree.map(jnp.ones_like, grads)
    updates, _ = tx.update(grads, tx.init(params), params)
    return [float(updates[k][0]) for k in "ab"]


def test_the_clip_is_of_the_global_norm():
    # With eps 1 the first update of Adam is -g / (|g| + 1).
    np.testing.assert_allclose(first_update(clip_norm=0.0), [-0.75, -0.8], rtol=2e-5)
    np.testing.assert_allclose(first_update(clip_norm=1.0), [-0.6 / 1.6, -0.8 / 1.8], rtol=2e-5)
    np.testing.assert_allclose(first_update(clip_norm=9.0), [-0.75, -0.8], rtol=2e-5)


def test_weight_decay_is_decoupled():
    got = first_update(clip_norm=0.0, weight_decay=0.1)
    np.testing.assert_allclose(got, [-0.85, -0.9], rtol=2e-5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schedule", "cosin"), ("learning_rate", 0.0), ("final_fraction", 1.5),
        ("warmup_steps", -1), ("clip_norm", -1.0), ("weight_decay", -0.1), ("b2", 1.0),
        ("b1", -0.1), ("eps", 0.0),
    ],
)  # fmt: skip
def test_bad_settings_are_named(field, value):
    with pytest.raises(ValueError, match=rf"optimizer\.{field}={value!r}: "):
        OptimizerSettings(**{field: value})
