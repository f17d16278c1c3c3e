"""Vocabularies that are padded, and teachers whose vocabulary ends elsewhere than the student's."""

import dataclasses

import jax
import numpy as np
import pytest

from opd_jax import guards, losses, scoring, steps, vocabulary
from opd_jax.algorithms import Teacher
from opd_jax.config import OpdSettings, Stage
from opd_jax.core import sharding
from opd_jax.data import tokenizer
from opd_jax.data.problem import Problem
from opd_jax.losses import group_loss
from opd_jax.models import hf_config, transformer
from opd_jax.models.config import ModelConfig
from opd_jax.rollout import Sampling
from tests import batches, test_algorithms, tiny
from tests.test_guards import hf_folder

C = batches.CONFIG
TOKENS = C.vocab_size
PADDED = C.replace(vocab_size=TOKENS + 8).of_tokens(TOKENS)


def pad(table_VD, rows, seed=5):
    """A table with rows that are no tokens, and would win every softmax."""
    junk_VD = 4 * np.random.default_rng(seed).normal(size=(rows, table_VD.shape[1]))
    return np.concatenate([table_VD, junk_VD.astype(np.float32)])


def padded(mesh, config=PADDED, seed=batches.STUDENT):
    """The parameters of `tiny` with more rows."""
    host = dict(tiny.host_params(C, seed))
    host["embedding"] = pad(host["embedding"], config.vocab_size - TOKENS)
    return jax.tree.map(jax.device_put, host, transformer.shardings(config, mesh))


# The numbers of the case.


@pytest.mark.parametrize(("student", "teacher"), [(3, 4), (4, 3), (3, 3), (4, 4)])
def test_t10_a_padded_row_has_no_mass_on_either_side(mesh, student, teacher):
    """Logits 2, 1, 0 and, where there is a fourth row, 3: as if that were not there."""
    z_V = np.array([2.0, 1.0, 0.0, 3.0], np.float32)
    hidden = sharding.put(mesh, np.ones((1, 3, 1), np.float32))
    ids = sharding.put(mesh, np.array([[0, 1, 2]], np.int32))
    want = [-0.407606, -1.407606, -2.407606]
    tables = [sharding.put(mesh, z_V[:rows, None]) for rows in (student, teacher)]
    for table in tables:
        scores = scoring.score(hidden, table, ids, tokens=3, top_k=3)
        np.testing.assert_allclose(scores.logp_BR[0], want, atol=1e-6)
        np.testing.assert_array_equal(scores.top_ids_BRk[0, 0], [0, 1, 2])
        entropy = -(np.exp(want) * want).sum()
        np.testing.assert_allclose(scores.entropy_BR[0], entropy, atol=1e-6)
    # A teacher's table as wide as the student's, whichever is wider.
    fitted = scoring.fit_rows(tables[1], student)
    assert fitted.shape[0] == student
    fitted_logp_R = scoring.score(hidden, fitted, ids, tokens=3).logp_BR[0]
    np.testing.assert_allclose(fitted_logp_R, want, atol=1e-6)
    # Control: counted, a fourth row takes all but 0.356 of the mass.
    if max(student, teacher) == 4:
        counted = scoring.score(hidden, tables[student < 4], ids)
        assert np.exp(counted.logp_BR[0]).sum() == pytest.approx(0.356, abs=1e-3)


def test_how_many_tokens_a_model_has():
    assert (C.tokens, PADDED.tokens) == (TOKENS, TOKENS)
    assert C.of_tokens(TOKENS) == C  # Nothing to leave out: the same programs as ever.
    assert PADDED.of_tokens(TOKENS + 8).num_tokens is None
    for count in (0, TOKENS + 9):
        with pytest.raises(ValueError, match=f"{count} tokens for a model of {TOKENS + 8} rows"):
            PADDED.of_tokens(count)


# What the sampler draws.


def test_t10_the_sampler_draws_no_padding(mesh):
    prompt, params = tiny.prompts(mesh), padded(mesh)

    def drawn(config):
        sampling = Sampling(samples=8, max_new_tokens=4, temperature=0.7)
        return steps.make_rollout_step(config, sampling)(params, prompt, jax.random.key(0))[0]

    rollout = drawn(PADDED)
    assert np.asarray(rollout.tokens_BR).max() < TOKENS
    # The recorded log-probs are those of the model without these rows.
    plain = steps.make_score_step(C, 0.7, 0)(tiny.params(mesh, C), rollout)
    np.testing.assert_allclose(rollout.logp_BR, plain.logp_BR, atol=2e-5)
    # Control: it would draw little else.
    assert (np.asarray(drawn(PADDED.of_tokens(TOKENS + 8)).tokens_BR) >= TOKENS).mean() > 0.5


# What the losses see.


def with_teacher(mesh, table_VD):
    """The group with what exact losses need; the teacher's hidden states are of its own model."""
    group = batches.put(mesh, batches.host(), table_VD)
    hidden = steps.make_hidden_step(C)(tiny.params(mesh, C, batches.TEACHER), group.rollout)
    return group.replace(teacher_hidden_BRD=hidden)


WEIGHTS = {kind: 1 + i / 7 for i, kind in enumerate(losses.TILES)}


# One of each way to a loss; the other divergences read the same two tiles of logits.
KINDS = ("policy_gradient", "sampled_token", "reverse_kl", "top_k")


def losses_and_gradient(config, params, group, kinds=KINDS):
    """Each kind's loss, and the gradient of a weighted sum of them: one program for all."""

    def total(params):
        found = {k: group_loss(params, config, group, batches.settings(k))[0] for k in kinds}
        return sum(WEIGHTS[k] * loss for k, loss in found.items()), found

    gradient, found = jax.jit(jax.grad(total, has_aux=True))(params)
    return {k: float(loss) for k, loss in found.items()}, jax.tree.map(np.asarray, gradient)


def test_t10_padding_changes_no_loss_and_no_gradient(mesh):
    """Student with 8 padded rows, teacher with 4: as without any, in every loss."""
    table_VD = tiny.host_params(C, batches.TEACHER)["embedding"]
    plain = with_teacher(mesh, table_VD)
    want, want_gradient = losses_and_gradient(C, tiny.params(mesh, C), plain)
    group = with_teacher(mesh, pad(table_VD, 4))
    found, gradient = losses_and_gradient(PADDED, padded(mesh), group)
    assert found == pytest.approx(want, abs=1e-6)
    assert (gradient["embedding"][TOKENS:] == 0).all()
    gradient["embedding"] = gradient["embedding"][:TOKENS]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradient, want_gradient)
    # Control: rows that are taken for tokens change every one of them.
    counted = PADDED.of_tokens(TOKENS + 8)
    wrong, gradient = losses_and_gradient(counted, padded(mesh), group)
    for kind, loss in want.items():
        assert abs(wrong[kind] - loss) > 0.01, kind
    assert np.abs(gradient["embedding"][TOKENS:]).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("rows", [0, 4, 16])
def test_t10_tables_of_any_width_over_shards_of_the_vocabulary(mesh, mesh_2x2x2, rows):
    table_VD = tiny.host_params(C, batches.TEACHER)["embedding"]
    found, kinds = [], ("reverse_kl", "sampled_token")
    with jax.set_mesh(mesh):
        plain = with_teacher(mesh, table_VD)
        want, _ = losses_and_gradient(C, tiny.params(mesh, C), plain, kinds)
    for where in (mesh, mesh_2x2x2):
        with jax.set_mesh(where):
            group = with_teacher(where, pad(table_VD, rows))
            found.append(losses_and_gradient(PADDED, padded(where), group, kinds))
    (one, one_gradient), (many, many_gradient) = found
    assert one == pytest.approx(want, abs=1e-5)
    assert many == pytest.approx(want, abs=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6), one_gradient, many_gradient
    )


def test_d08_the_student_itself_says_nothing_whatever_its_padding(mesh):
    """If the sampler counted other tokens than the scorer, the signal would be log of the rest."""
    sampling, placed = test_algorithms.context(mesh).stage.sampling, tiny.prompts(mesh)
    rollout, _ = steps.make_rollout_step(PADDED, sampling)(padded(mesh), placed, jax.random.key(3))
    mask = np.asarray(rollout.mask_BR)
    for config, silent in ((PADDED, True), (PADDED.of_tokens(TOKENS + 8), False)):
        score = steps.make_score_step(config, sampling.temperature, 4)
        gap = np.asarray(score(padded(mesh), rollout).logp_BR - rollout.logp_BR)[mask]
        assert (np.abs(gap).max() < 1e-4) == silent


# Who shares what.


def stage(*teachers, classes=()):
    names = [f"d{i}" for i in range(len(teachers))]
    return Stage(
        "opd", "scratch", dict.fromkeys(names, 1 / len(names)),
        {name: f"hf:{t}" for name, t in zip(names, teachers, strict=True)},
        opd=OpdSettings(stop_token_classes=classes),
    )  # fmt: skip


def test_t10_the_shared_vocabulary_ends_where_the_first_one_does(tmp_path):
    """tests.test_guards' folders: <end>, <stop> and some words; models of 32 rows."""
    own = tokenizer.load(str(hf_folder(tmp_path / "own")))  # 5 tokens.
    more = hf_folder(tmp_path / "more", words="abcd")
    fewer = hf_folder(tmp_path / "fewer", words="ab")
    assert vocabulary.shared_tokens(stage(tmp_path / "own"), own) == 5
    assert vocabulary.shared_tokens(stage(more), own) == 5
    assert vocabulary.shared_tokens(stage(more, fewer), own) == 4
    assert vocabulary.shared_tokens(Stage("grpo", "scratch", {"a": 1.0}, {}), own) == 5
    assert vocabulary.shared_tokens(stage(fewer, classes=((0, 1),)), own) == 4
    with pytest.raises(ValueError, match=r"ends at 4 and has no token \[4\]; leave them out"):
        vocabulary.shared_tokens(stage(fewer, classes=((0, 4),)), own)


def test_t10_a_prompt_that_the_teacher_cannot_read_is_refused(tmp_path):
    own = tokenizer.load(str(hf_folder(tmp_path / "own")))

    def prompt(text):
        return [Problem("d", 1, 1, text, "a", {})]

    vocabulary.check_readable(prompt("c"), own, 5, "teachers.a")
    vocabulary.check_readable(prompt("b"), own, 4, "teachers.a")
    with pytest.raises(ValueError, match=r"teachers\.a: .* problem 1 .* token 4 \('c'\), .* at 4;"):
        vocabulary.check_readable(prompt("c"), own, 4, "teachers.a")


def test_a_teacher_counts_the_students_tokens_before_anything_is_trained():
    wide = C.replace(vocab_size=TOKENS + 8)
    teacher = Teacher("hf:x", wide, (), {})
    with pytest.raises(ValueError, match=rf"has {TOKENS + 8} tokens, the student's {TOKENS};"):
        guards.check_teacher(teacher, "teachers.a", C, 20)
    narrowed = dataclasses.replace(teacher, config=wide.of_tokens(TOKENS))
    guards.check_teacher(narrowed, "teachers.a", C, 20)


def test_padding_is_no_part_of_an_exported_model():
    """A folder of a model says nothing of its tokens: export and import know nothing of them."""
    whole = ModelConfig(**(dataclasses.asdict(PADDED) | {"num_tokens": None}))
    assert hf_config.render(PADDED, None, "float32") == hf_config.render(whole, None, "float32")
