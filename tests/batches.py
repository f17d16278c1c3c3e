"""A tiny batch with every field that a loss may read, and all losses written out the naive way."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from opd_jax.core import sharding
from opd_jax.core.types import PromptBatch, Rollout, Scores
from opd_jax.losses import Group, LossSettings
from opd_jax.models import transformer
from tests import tiny

CONFIG = tiny.CONFIG.replace(num_layers=1)  # One layer compiles in half the time of two.
TEMPERATURE, TOP_K, BETA = 0.7, 4, 0.3
PROMPTS = (6, 3, 4, 1, 2, 5, 6, 1)  # Tokens of each prompt.
# Tokens of each completion, two per prompt: nothing, one token, and all the columns among them.
LENGTHS = (5, 1, 3, 0, 2, 5, 4, 2, 5, 5, 1, 3, 2, 4, 0, 5)
COLUMNS, SAMPLES = 5, 2
STUDENT, TEACHER = 0, 7  # Seeds.


def settings(kind, **changes):
    """A loss with every option switched on."""
    every = LossSettings(
        kind=kind,
        temperature=TEMPERATURE,
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=1.5,
        kl_coefficient=0.3 if kind == "policy_gradient" else 0.0,
        kl_kind="k3",
        top_k=TOP_K,
        top_k_form="renormalised",
        jsd_beta=BETA,
    )
    return dataclasses.replace(every, **changes)


def mask():
    """bool `[B, R]`."""
    return np.arange(COLUMNS)[None, :] < np.array(LENGTHS)[:, None]


@functools.cache
def plain_logits(seed, first=None):
    """Logits `[B, R, V]` from a plain forward of each whole row: prompt, then completion.

    Of the R positions from `first` on; by default those that predict the completion's tokens.
    """
    rows, lengths, position_BR = _rows()
    if first is not None:
        position_BR = position_BR * 0 + first + np.arange(COLUMNS)
    mesh = sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        params = tiny.params(mesh, CONFIG, seed)
        return np.asarray(_plain()(params, rows, lengths, position_BR))


def plain_pullback(params, dz_BRV):
    """The gradient for the parameters of a loss whose gradient for `plain_logits` is given."""
    return _plain_pullback()(params, *_rows(), dz_BRV)


@functools.cache
def _rows():
    rows, lengths = tiny.whole_rows(_prompt(), _tokens())
    predicting = (lengths - COLUMNS - 1)[:, None] + np.arange(COLUMNS)[None, :]
    return rows, lengths.astype(np.int32), predicting


def _plain_logits(params, rows, lengths, predicting):
    hidden = transformer.forward(params, CONFIG, rows, lengths)
    hidden_BRD = jnp.take_along_axis(hidden, predicting[..., None], axis=1)
    return hidden_BRD @ transformer.unembedding(params).T


@functools.cache
def _plain():
    return jax.jit(_plain_logits)


@functools.cache
def _plain_pullback():
    def product(params, rows, lengths, predicting, dz_BRV):
        return jnp.sum(_plain_logits(params, rows, lengths, predicting) * dz_BRV)

    return jax.jit(jax.grad(product))


def plain_losses(z_BRV, teacher_z_BRV, group):
    """Per-token losses of every kind, `[B, R]`, from whole log-softmaxes; in `losses.TILES`' order.

    Nothing of the project's is called, and nothing is guarded: the inputs must be finite.
    """
    s, stop = settings("policy_gradient"), jax.lax.stop_gradient
    p, q = (jax.nn.log_softmax(z / TEMPERATURE, axis=-1) for z in (z_BRV, stop(teacher_z_BRV)))
    chosen = group.rollout.tokens_BR[..., None]
    logp = jnp.take_along_axis(p, chosen, axis=-1)[..., 0]
    teacher_logp = jnp.take_along_axis(q, chosen, axis=-1)[..., 0]
    ratio = jnp.exp(logp - group.rollout.logp_BR)

    def clipped(advantage):
        value = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.28) * advantage)
        return -jnp.where(advantage < 0, jnp.maximum(value, s.dual_clip * advantage), value)

    def kl(a, b):
        return jnp.sum(jnp.exp(a) * (a - b), axis=-1)

    # The value of k3 with the gradient of k2.
    gap = logp - group.reference_logp_BR
    k2, k3 = gap**2 / 2, jnp.exp(-gap) - 1 + gap
    likeliest = jnp.argsort(-stop(p), axis=-1)[..., :TOP_K]
    p_k, q_k = (jax.nn.log_softmax(jnp.take_along_axis(x, likeliest, -1), -1) for x in (p, q))
    mixture = jnp.log(BETA * jnp.exp(q) + (1 - BETA) * jnp.exp(p))
    return {
        "policy_gradient": clipped(group.advantage_BR) + s.kl_coefficient * (k2 + stop(k3 - k2)),
        "sampled_token": clipped(teacher_logp - group.rollout.logp_BR),
        "reverse_kl": kl(p, q),
        "forward_kl": kl(q, p),
        "jsd": BETA * kl(q, mixture) + (1 - BETA) * kl(p, mixture),
        "top_k": kl(p_k, q_k),
        "supervised": -logp,
    }


def log_softmax(z_BRV):
    """In numpy, at the batch's temperature."""
    z = z_BRV / TEMPERATURE
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def chosen(x_BRV):
    """The values at the completions' tokens, `[B, R]`."""
    return np.take_along_axis(x_BRV, _tokens()[..., None], -1)[..., 0]


@functools.cache
def host():
    """The group as numpy, without the teacher's hidden states; padding holds zeros."""
    rng, real = np.random.default_rng(3), mask()

    def noisy(x, scale):
        return np.where(real, x + scale * rng.normal(size=x.shape), 0).astype(np.float32)

    logp_BR = chosen(log_softmax(plain_logits(STUDENT)))
    teacher = log_softmax(plain_logits(TEACHER))
    top_BRk = np.argsort(-teacher, axis=-1, kind="stable")[..., :TOP_K]
    scores = Scores(
        logp_BR=noisy(chosen(teacher), 0),
        entropy_BR=noisy(-(np.exp(teacher) * teacher).sum(-1), 0),
        top_ids_BRk=top_BRk.astype(np.int32),
        top_logp_BRk=np.take_along_axis(teacher, top_BRk, -1),
    )
    rollout = Rollout(
        prompt=_prompt(), tokens_BR=_tokens(), mask_BR=real, logp_BR=noisy(logp_BR, 0.3),
        length_B=np.array(LENGTHS, np.int32), stopped_B=np.arange(16) % 3 > 0,
    )  # fmt: skip
    return Group(
        rollout=rollout,
        weight_BR=(real / real.sum()).astype(np.float32),
        advantage_BR=noisy(np.zeros(real.shape), 1.5),
        reference_logp_BR=noisy(logp_BR, 0.4),
        teacher=scores,
    )


def put(mesh, group, table_VD=None):
    """A group onto a mesh; a teacher's table goes by its own layout."""
    group = sharding.put(mesh, group)
    if table_VD is None:
        return group
    layout = sharding.sharding(mesh, "vocab", "embed")
    return group.replace(teacher_table_VD=jax.device_put(table_VD, layout))


def take(group, prompts):
    """The rows of some prompts of a host group, in the order given."""
    prompts = np.asarray(prompts)

    def rows(x):
        n = x.shape[0] // len(PROMPTS)
        return x[(prompts[:, None] * n + np.arange(n)).reshape(-1)]

    return jax.tree.map(rows, group)


@functools.cache
def _tokens():
    tokens = np.random.default_rng(1).integers(0, CONFIG.vocab_size, mask().shape)
    return np.where(mask(), tokens, 0).astype(np.int32)


@functools.cache
def _prompt():
    rng, P = np.random.default_rng(0), len(PROMPTS)
    return PromptBatch(
        tokens_PL=rng.integers(0, CONFIG.vocab_size, (P, 6)).astype(np.int32),
        length_P=np.array(PROMPTS, np.int32),
        domain_P=np.zeros(P, np.int32),
        id_P=np.arange(P).astype(np.uint32),
        stop_PS=np.full((P, 1), -1, np.int32),
    )
