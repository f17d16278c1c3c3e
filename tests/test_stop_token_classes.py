"""Stop tokens of one meaning: a base student's and its instruct teacher's count as one token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opd_jax import guards, losses, scoring
from opd_jax.config import OpdSettings, Stage
from opd_jax.core import sharding
from opd_jax.data import tokenizer
from opd_jax.objectives import opd
from tests import batches
from tests.test_guards import hf_folder

CLASSES = ((0, 2),)
P, Q = np.log([0.5, 0.3, 0.15, 0.05]), np.log([0.1, 0.3, 0.55, 0.05])


def logits(*rows):
    """`[1, C, V]`, laid out as in a tile."""
    layout = sharding.sharding(jax.sharding.get_mesh(), "batch", "time", "vocab")
    return jax.device_put(np.asarray(rows, np.float32)[None], layout)


def put(*columns):
    """Columns `[1, C, ...]` of a tile, from their values."""
    mesh = jax.sharding.get_mesh()
    return [sharding.put(mesh, np.asarray(column)[None]) for column in columns]


def settings(kind, classes=CLASSES):
    return batches.settings(
        kind, temperature=1.0, top_k=2, kl_coefficient=0.0, dual_clip=0.0,
        stop_token_classes=classes,
    )  # fmt: skip


def test_the_first_of_a_class_has_the_mass_of_all():
    got = np.exp(scoring.join_logits(logits(P), CLASSES))[0, 0]
    np.testing.assert_allclose(got, [0.65, 0.3, 0, 0.05], atol=1e-6)
    np.testing.assert_array_equal(scoring.join_logits(logits(P), ()), logits(P))
    tokens = scoring.join_tokens(jnp.array([[0, 1, 2, 3]]), CLASSES)
    np.testing.assert_array_equal(tokens, [[0, 1, 0, 3]])


def test_a_sharded_vocabulary_gives_the_same(mesh_2x2x2):
    z_BCV = np.random.default_rng(0).normal(size=(4, 3, 8)).astype(np.float32)
    layout = sharding.sharding(mesh_2x2x2, "batch", "time", "vocab")
    classes = ((1, 6), (2, 3))
    got = jax.jit(lambda z: scoring.join_logits(z, classes))(jax.device_put(z_BCV, layout))
    assert jax.typeof(got).sharding.spec == layout.spec
    p = np.exp(z_BCV)
    want = p.copy()
    want[..., 1], want[..., 2] = p[..., 1] + p[..., 6], p[..., 2] + p[..., 3]
    want[..., [3, 6]] = 0
    np.testing.assert_allclose(np.exp(got), want, rtol=1e-5)


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd", "top_k"])
def test_models_that_differ_only_in_how_they_stop_agree(kind):
    """P and Q give their class 0.65 each and part it differently."""
    columns = {"tokens": put([0])[0], "teacher_logits": logits(Q)}

    def loss(z, classes):
        return losses.TILES[kind](z, columns, settings(kind, classes))["loss"].sum()

    @jax.jit
    def both(z):
        """With the class; and the control, two stop tokens taken for two things."""
        return jax.value_and_grad(loss)(z, CLASSES), loss(z, ())

    (value, gradient), apart = both(logits(P))
    assert value == pytest.approx(0, abs=1e-6)
    assert np.abs(gradient).max() < 1e-6
    assert apart > 0.05


def test_the_sampled_token_has_the_gradient_of_the_joined_kl():
    """Enumerated: the expected policy gradient over all tokens is that of KL(P' || Q')."""
    z, q = logits(P), logits(np.log([0.3, 0.1, 0.55, 0.05]))

    # Every token in a column of its own, each weighted by its probability.
    everywhere = [jnp.broadcast_to(x, (1, 4, 4), out_sharding=jax.typeof(x).sharding)
                  for x in (z, q)]  # fmt: skip
    tokens, behaviour_logp, weight = put(
        np.arange(4, dtype=np.int32), np.float32(P), np.exp(np.float32(P))
    )

    def expected_loss(z, q, classes):
        joined = scoring.join_tokens(tokens, classes)
        columns = {
            "tokens": tokens,
            "teacher": scoring.score_logits(scoring.join_logits(q, classes), joined, 2),
            "behaviour_logp": behaviour_logp,
        }
        s = settings("sampled_token", classes)
        return jnp.sum(weight * losses.TILES["sampled_token"](z, columns, s)["loss"])

    def joined_kl(z):
        return opd.reverse_kl(*(scoring.join_logits(x, CLASSES) for x in (z, q))).sum()

    @jax.jit
    def gradients(z, q):
        with_classes, without = (
            jax.grad(expected_loss)(z, q, classes).sum((0, 1)) for classes in (CLASSES, ())
        )
        return with_classes, without, jax.grad(joined_kl)(z[:, :1])[0, 0]

    with_classes, without, want = map(np.asarray, gradients(*everywhere))
    assert np.abs(want).max() > 0.05
    np.testing.assert_allclose(with_classes, want, atol=1e-6)
    assert np.abs(without - want).max() > 0.05  # Control.


def test_d19_the_guard_says_what_to_declare_and_then_accepts_it(tmp_path):
    own = tokenizer.load(str(hf_folder(tmp_path / "base")))
    teacher = f"hf:{hf_folder(tmp_path / 'instruct', stop=(1,))}"
    with pytest.raises(ValueError, match=r"opd\.stop_token_classes=\(\(0, 1\),\)"):
        guards.check_source(teacher, "teachers.a", own, teaches=True)
    guards.check_source(teacher, "teachers.a", own, teaches=True, stop_token_classes=((0, 1),))
    with pytest.raises(ValueError, match="stops at tokens"):  # A class of other tokens.
        guards.check_source(teacher, "teachers.a", own, teaches=True, stop_token_classes=((1, 2),))


def test_a_class_must_be_of_stop_tokens_that_are_there(tmp_path):
    own = tokenizer.load(str(hf_folder(tmp_path / "base")))  # Five tokens, of which 0 stops.
    stage = Stage("opd", "scratch", {"a": 1.0}, {"a": "self"})

    def check(ids):
        opd_settings = OpdSettings(stop_token_classes=(ids,))
        guards.check_stop_tokens(dataclasses.replace(stage, opd=opd_settings), "stages.x", own)

    check((0, 4))
    with pytest.raises(ValueError, match=r"stages\.x\.opd.*\(0, 5\): .* has no token \[5\]"):
        check((0, 5))
    with pytest.raises(ValueError, match=r"\(1, 2\): none .* stops at \[0\], name one of these"):
        check((1, 2))


def test_the_sampler_stops_at_every_token_of_the_class(tmp_path):
    own = tokenizer.load(str(hf_folder(tmp_path / "base")))
    assert tokenizer.stopping_at(own, ((3, 0), (2, 4))).stop_ids == (0, 3)
    assert tokenizer.stopping_at(own, ()).stop_ids == own.stop_ids == (0,)


@pytest.mark.parametrize("classes", [((0,),), ((0, 1), (1, 2)), ((0, 0),)])
def test_classes_that_say_nothing_or_overlap_are_refused(classes):
    with pytest.raises(ValueError, match=r"opd\.stop_token_classes=.*write e\.g\. \(\(0, 2\),\)"):
        OpdSettings(stop_token_classes=classes)
