import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opd_jax import scoring
from opd_jax.choice import block_width, draw, keep_likeliest
from opd_jax.core import sharding
from opd_jax.core.types import PromptBatch
from opd_jax.data.problem import Problem
from opd_jax.data.prompts import encode_prompts
from opd_jax.models import transformer
from opd_jax.models.config import ModelConfig
from opd_jax.rollout import Sampling, phases, row_keys, sample
from tests import tiny

C = tiny.CONFIG.replace(num_layers=1)
PLAIN = Sampling(samples=2, max_new_tokens=6)
GREEDY = Sampling(samples=2, max_new_tokens=6, temperature=0.0)

# A model whose next token depends on the last one only: embeddings are one-hot and attention and
# MLP are zero, so the head is a table of transitions and every probability is known.
BIGRAM = ModelConfig(
    vocab_size=16, embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=2, mlp_dim=2,
    max_length=2048, norm_eps=1e-12, tie_embeddings=False,
)  # fmt: skip
FOUR = Sampling(samples=1, max_new_tokens=4)

# Compiling is most of the time of these tests, and half of that is LLVM's optimisation.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def sampler(config, sampling):
    """jitted (params, prompts, key) -> (rollout, decode steps), one program for all tests."""
    return jit(lambda params, prompt, key: sample(params, config, prompt, key, sampling))


def masked_logp(params, prompt, tokens_BR, mask_BR, config=C, temperature=1.0):
    """The scorer's log-probs, 0 where masked, and their sum before them."""
    hidden_BRD = transformer.completion_hidden(params, config, prompt, tokens_BR)
    table_VD = transformer.unembedding(params)
    scores = scoring.score(hidden_BRD, table_VD, tokens_BR, temperature=temperature)
    logp_BR = jnp.where(mask_BR, scores.logp_BR, 0)
    return logp_BR.sum(), logp_BR


@functools.cache
def scorer(temperature):
    """jitted (params, prompts, tokens, mask) -> sum of log-probs, log-probs."""
    return jit(functools.partial(masked_logp, temperature=temperature))


def prompts(mesh, rows=4, stop=()):
    """Prompts of the tiny model with up to eight stop tokens."""
    lengths = (6, 3, 4, 1)[:rows]
    return tiny.prompts(mesh, lengths=lengths, stop=[*stop, *(-1,) * 8][:8])


def run(mesh, sampling=PLAIN, key=0, params=None, prompt=None):
    """A rollout of the tiny model, on the host."""
    params = tiny.params(mesh, C) if params is None else params
    prompt = prompts(mesh) if prompt is None else prompt
    return jax.device_get(sampler(C, sampling)(params, prompt, jax.random.key(key))[0])


def off(mesh, rollout, params, temperature=1.0):
    """The largest difference of the rollout's log-probs from the scorer's under some weights."""
    prompt, tokens_BR, mask_BR = sharding.put(
        mesh, (rollout.prompt, rollout.tokens_BR, rollout.mask_BR)
    )
    _, logp_BR = scorer(temperature)(params, prompt, tokens_BR, mask_BR)
    return np.abs(rollout.logp_BR - np.asarray(logp_BR)).max()


def bigram(mesh, logits_VV):
    """Parameters under which token `b` follows token `a` with logit `logits[a, b]`."""
    shapes = jax.eval_shape(lambda: transformer.init(BIGRAM, jax.random.key(0)))
    host = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    host["final_norm"] = np.ones(16, np.float32)
    host["embedding"] = np.eye(16, dtype=np.float32)
    host["head"] = np.asarray(logits_VV, np.float32).T / 4  # The norm turns 1 into sqrt(16).
    return jax.tree.map(jax.device_put, host, transformer.shardings(BIGRAM, mesh))


def chain(mesh, *walks):
    """A bigram model that walks the given ways, each step with probability 1 to 1e-20."""
    logits_VV = np.zeros((16, 16))
    for walk in walks:
        for a, b in itertools.pairwise(walk):
            logits_VV[a, b] = 50
    return bigram(mesh, logits_VV)


def after(mesh, prompts, stops, columns=5):
    """Prompts given as token lists, left-padded with token 2; a list of stop tokens for each."""
    tokens_PL = np.full((len(prompts), columns), 2, np.int32)
    for row, prompt in zip(tokens_PL, prompts, strict=True):
        row[columns - len(prompt) :] = prompt
    batch = PromptBatch(
        tokens_PL=tokens_PL,
        length_P=np.array([len(p) for p in prompts], np.int32),
        domain_P=np.zeros(len(prompts), np.int32),
        id_P=np.arange(len(prompts)).astype(np.uint32),
        stop_PS=np.array([[*s, -1, -1][:2] for s in stops], np.int32),
    )
    return sharding.put(mesh, batch)


def walk(params, prompt, sampling=FOUR):
    """A rollout of a bigram model, on the host, and its decode steps."""
    return jax.device_get(sampler(BIGRAM, sampling)(params, prompt, jax.random.key(0)))


# Where completions end, and what is trained.


# In BIGRAM token 0 is followed by 5, 2 and then 7; token 1 by 6, 8, 9, 10; token 3 by 2 for ever.
WALKS = ((0, 5, 2, 2), (1, 6, 8, 9, 10), (3, 2), (4, 11, 12, 13, 2))


def test_m01_m02_m04_masks_end_with_the_stop_token(mesh):
    prompt = after(mesh, [[0], [1], [3], [4]], [[2]] * 4)
    rollout, steps = walk(chain(mesh, *WALKS), prompt)
    assert rollout.tokens_BR.tolist() == [
        [5, 2, 0, 0],
        [6, 8, 9, 10],
        [2, 0, 0, 0],
        [11, 12, 13, 2],
    ]
    assert rollout.mask_BR.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert rollout.length_B.tolist() == [2, 4, 1, 4]
    # Only the row without a stop token is truncated; a stop in the last column is a stop.
    assert rollout.stopped_B.tolist() == [True, False, True, True]
    assert steps == 3
    assert not rollout.logp_BR[~rollout.mask_BR].any()
    # Control: without its stop token the first row goes on.
    rollout, _ = walk(chain(mesh, *WALKS), after(mesh, [[0], [1], [3], [4]], [[15]] * 4))
    assert rollout.tokens_BR[0].tolist() == [5, 2, 2, 2]
    assert rollout.mask_BR.all()
    assert not rollout.stopped_B.any()


def test_m02_the_stop_token_is_trained(mesh):
    params = bigram(mesh, np.random.default_rng(0).normal(size=(16, 16)))
    prompt = after(mesh, [[0]], [[2]])
    grad_of = jit(jax.grad(functools.partial(masked_logp, config=BIGRAM), has_aux=True))

    def grad(mask_R):
        rows = np.array([[5, 2, 7, 7]], np.int32), np.array([mask_R], bool)
        return grad_of(params, prompt, *sharding.put(mesh, rows))[0]["head"]

    # The logit of stop token 2 after token 5.
    assert abs(grad([1, 1, 0, 0])[2, 5]) > 0.1
    assert grad([1, 0, 0, 0])[2, 5] == 0


def test_m03_a_pad_token_that_is_a_stop_token_hides_nothing(mesh):
    prompt = after(mesh, [[5, 2, 6]] * 4, [[2]] * 4)
    assert prompt.tokens_PL[0].tolist() == [2, 2, 5, 2, 6]
    rollout, _ = walk(chain(mesh, (6, 7, 2, 2)), prompt)
    assert rollout.tokens_BR.tolist() == [[7, 2, 0, 0]] * 4
    assert rollout.mask_BR.tolist() == [[1, 1, 0, 0]] * 4

    prefill = jit(lambda params, *prompt: transformer.prefill(params, C, *prompt))
    params = tiny.params(mesh, C)

    def last(tokens_L):
        tokens_PL = sharding.put(mesh, np.tile(np.array(tokens_L, np.int32), (4, 1)))
        return prefill(params, tokens_PL, prompt.length_P)

    hidden, prefix = last([2, 2, 5, 2, 6])
    assert prefix.mask_PL[0].tolist() == [False, False, True, True, True]
    np.testing.assert_array_equal(hidden, last([9, 9, 5, 2, 6])[0])
    # Control: the real 2 inside the prompt is seen.
    assert np.abs(hidden - last([2, 2, 5, 9, 6])[0]).max() > 0.01


def test_m09_every_row_has_its_own_set_of_stop_tokens(mesh):
    walks = ((0, 5, 6, 7, 8),)
    stops = [[7, 6], [6, 7], [7, -1], [-1, -1]]
    rollout, _ = walk(chain(mesh, *walks), after(mesh, [[0]] * 4, stops))
    assert rollout.tokens_BR.tolist() == [[5, 6, 0, 0], [5, 6, 0, 0], [5, 6, 7, 0], [5, 6, 7, 8]]
    assert rollout.length_B.tolist() == [2, 2, 3, 4]
    assert rollout.stopped_B.tolist() == [True, True, True, False]


def test_m17_completions_of_one_token(mesh):
    params = chain(mesh, (0, 2), (1, 6, 8))
    prompt = after(mesh, [[0], [1], [0], [1]], [[2]] * 4)
    rollout, steps = walk(params, prompt, Sampling(samples=2, max_new_tokens=1))
    assert rollout.tokens_BR.tolist() == [[2], [2], [6], [6]] * 2
    assert rollout.mask_BR.all()
    assert rollout.stopped_B.tolist() == [True, True, False, False] * 2
    assert steps == 0
    np.testing.assert_allclose(rollout.logp_BR, np.zeros((8, 1)), atol=1e-6)


def test_m23_prompt_tokens_are_never_in_the_mask(mesh):
    # A prompt that ends in a turn which the template closed: 9, 9 and a stop token.
    prompt = after(mesh, [[9, 9, 2], [2], [9, 9, 9, 9, 2], [9]], [[2]] * 4)
    rollout, _ = walk(chain(mesh, (2, 5, 6, 2), (9, 9, 9)), prompt)
    assert rollout.tokens_BR.tolist() == [[5, 6, 2, 0]] * 3 + [[9, 9, 9, 9]]
    assert rollout.mask_BR.tolist() == [[1, 1, 1, 0]] * 3 + [[1, 1, 1, 1]]
    assert rollout.length_B.tolist() == [3, 3, 3, 4]


def test_s15_the_loop_ends_when_every_row_has(mesh):
    walks = ((0, 5, 6, 2), (1, 2), (3, 7, 8, 9, 10, 11, 12, 12))
    params, long = chain(mesh, *walks), Sampling(samples=1, max_new_tokens=1000)
    rollout, steps = walk(params, after(mesh, [[0], [1]], [[2]] * 2), long)
    assert rollout.length_B.tolist() == [3, 1]
    assert steps <= 4
    # Control: a row that never stops takes every step.
    assert walk(params, after(mesh, [[3], [1]], [[2]] * 2), long)[1] == 999


def test_s15_a_row_that_ended_is_frozen_while_others_go_on(mesh):
    walks = ((0, 5, 2, 7, 7), (1, 2), (3, 7, 7, 7, 7))
    params, stops = chain(mesh, *walks), [[2]] * 4
    short, short_steps = walk(params, after(mesh, [[0], [1], [0], [1]], stops))
    long, long_steps = walk(params, after(mesh, [[0], [3], [0], [3]], stops))
    assert (short_steps, long_steps) == (1, 3)
    assert short.tokens_BR[0].tolist() == [5, 2, 0, 0]
    for name in ("tokens_BR", "mask_BR", "logp_BR", "length_B", "stopped_B"):
        a, b = getattr(short, name), getattr(long, name)
        np.testing.assert_array_equal(a[::2], b[::2])
        assert name == "logp_BR" or (a[1::2] != b[1::2]).any()


# Log-probs of the sampler and of the scorer.


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_n01_sampler_and_scorer_agree_at_every_temperature(mesh, temperature):
    params, prompt = tiny.params(mesh, C), prompts(mesh, stop=(3, 4, 5, 6, 7, 8, 9, 10))
    rollout = run(mesh, Sampling(2, 6, temperature), prompt=prompt)
    assert 12 < rollout.mask_BR.sum() < 48
    assert off(mesh, rollout, params, temperature) < 1e-5
    # Control: log-probs at another temperature give ratios far from 1.
    assert off(mesh, rollout, params, 1.0 if temperature != 1.0 else 0.6) > 0.1


def test_n01_the_recorded_log_prob_is_of_the_tempered_distribution(mesh):
    z_BV = lay_logits(mesh, np.tile([2.0, 1.0, 0.0], (64, 1)))
    token_B, logp_B = draw_rows(mesh, z_BV, Sampling(1, 1, temperature=0.5))
    assert set(token_B.tolist()) >= {0, 1}
    np.testing.assert_allclose(logp_B[token_B == 0], -0.142932, atol=1e-6)
    np.testing.assert_allclose(logp_B[token_B == 1], -2.142932, atol=1e-6)


def test_s16_the_sampler_follows_new_weights(mesh):
    old = tiny.params(mesh, C)
    # The same programs run with the old weights first.
    assert off(mesh, run(mesh, params=old), old) < 1e-5
    # Not doubled: logits of 30 and more would be rounded to steps of 2e-6 and more.
    new = jax.tree.map(lambda x: -x, old)
    rollout = run(mesh, params=new)
    assert off(mesh, rollout, new) < 1e-5
    # Control: the old weights are told apart.
    assert off(mesh, rollout, old) > 0.5


@pytest.mark.parametrize("bad", [{"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.0}])
def test_n03_s07_training_refuses_samples_that_bias_the_ratio(bad):
    Sampling(4, 8).check_trainable()
    with pytest.raises(ValueError, match=f"{next(iter(bad))}=.*in training"):
        Sampling(4, 8, **bad).check_trainable()


def test_n03_filtered_samples_record_the_renormalised_log_prob(mesh):
    p = np.array([0.5, 0.3, 0.15, 0.05])
    z_BV = lay_logits(mesh, np.tile(np.log(p), (64, 1)))
    token_B, logp_B = draw_rows(mesh, z_BV, Sampling(1, 1, top_p=0.8))
    assert set(token_B) == {0, 1}
    np.testing.assert_allclose(logp_B[token_B == 1], -0.980829, atol=1e-5)
    np.testing.assert_allclose(logp_B[token_B == 0], np.log(0.5 / 0.8), atol=1e-5)
    # Control: unfiltered, the log-prob is over the whole vocabulary; the ratio of the two is 0.8.
    token_B, whole_B = draw_rows(mesh, z_BV, Sampling(1, 1))
    np.testing.assert_allclose(whole_B[token_B == 1], -1.203973, atol=1e-5)
    assert set(token_B) == {0, 1, 2, 3}


# Noise: who draws the same, and whether it is the right distribution.


def test_s06_noise_belongs_to_the_problem_and_the_seed(mesh):
    want = run(mesh)
    np.testing.assert_array_equal(run(mesh).tokens_BR, want.tokens_BR)
    assert (run(mesh, key=1).tokens_BR != want.tokens_BR).any(-1).all()
    # Two samples of a prompt, and the same prompts under other ids, as on another host.
    assert (want.tokens_BR[::2] != want.tokens_BR[1::2]).any(-1).all()
    prompt = jax.device_get(prompts(mesh))
    other = sharding.put(mesh, prompt.replace(id_P=prompt.id_P + np.uint32(4)))
    assert (run(mesh, prompt=other).tokens_BR != want.tokens_BR).any(-1).all()
    # The same rows in another order: each keeps its completions.
    order = np.array([2, 0, 3, 1])
    moved = run(mesh, prompt=sharding.put(mesh, jax.tree.map(lambda x: x[order], prompt)))
    rows = (2 * order[:, None] + np.arange(2)).reshape(-1)
    np.testing.assert_array_equal(moved.tokens_BR, want.tokens_BR[rows])
    np.testing.assert_allclose(moved.logp_BR, want.logp_BR[rows], atol=1e-5)


def test_s06_more_samples_leave_the_first_ones_as_they_are(mesh):
    key, id_P = jax.random.key(0), sharding.put(mesh, np.array([7, 8], np.uint32))
    two, three = (np.asarray(jax.random.key_data(keys_of(key, id_P, n))) for n in (2, 3))
    np.testing.assert_array_equal(two.reshape(2, 2, -1), three.reshape(2, 3, -1)[:, :2])
    assert len({tuple(k) for k in three.tolist()}) == 6


def test_s06_eight_devices_draw_what_one_does(mesh, mesh_2x2x2):
    with jax.set_mesh(mesh):
        want = run(mesh)
    got = run(mesh_2x2x2)
    np.testing.assert_array_equal(got.tokens_BR, want.tokens_BR)
    np.testing.assert_allclose(got.logp_BR, want.logp_BR, atol=1e-5)
    # Control: another seed there differs.
    assert (run(mesh_2x2x2, key=1).tokens_BR != want.tokens_BR).any()
    args = tiny.params(mesh_2x2x2, C), prompts(mesh_2x2x2), jax.random.key(0)
    rollout, _ = jax.eval_shape(sampler(C, PLAIN), *args)
    assert rollout.tokens_BR.sharding.spec == sharding.spec("batch", None)


def chi_square(counts, p):
    """Pearson's statistic in standard deviations above its mean."""
    expected = counts.sum() * p
    free = p.size - 1
    return (((counts - expected) ** 2 / expected).sum() - free) / np.sqrt(2 * free)


def test_samples_follow_the_softmax_and_columns_are_independent(mesh):
    z = np.array([2.0, 1.0, 0.5, 0.0])
    logits_VV = np.full((16, 16), -60.0)
    logits_VV[:, :4] = z
    prompt = after(mesh, [[0]] * 8, [[-1]] * 8)
    many = Sampling(samples=512, max_new_tokens=2, temperature=0.8)
    tokens_BR = walk(bigram(mesh, logits_VV), prompt, many)[0].tokens_BR
    first, second = tokens_BR[:, 0], tokens_BR[:, 1]

    def softmax(z):
        return np.exp(z) / np.exp(z).sum()

    p = softmax(z / 0.8)
    for column in (first, second):
        counts = np.bincount(column, minlength=4)
        assert chi_square(counts, p) < 4
        # Control: the distribution of another temperature is rejected.
        assert chi_square(counts, softmax(z)) > 4
    joint = np.bincount(4 * first + second, minlength=16)
    assert chi_square(joint, np.outer(p, p).reshape(-1)) < 4
    # Control: columns that share their noise.
    same = np.bincount(5 * first, minlength=16)
    assert chi_square(same, np.outer(p, p).reshape(-1)) > 4
    # All 512 samples of a prompt, and all prompts, have noise of their own.
    by_prompt = first.reshape(8, 512)
    assert max(chi_square(np.bincount(row, minlength=4), p) for row in by_prompt) < 5
    assert len({tuple(row) for row in by_prompt}) == 8


# Greedy choice, blocks and filters.


def lay_logits(mesh, z):
    """Logits `[B, V]` in the layout that `scoring.logits` gives them."""
    layout = sharding.sharding(mesh, "batch", "vocab")
    return jax.device_put(jnp.asarray(z, jnp.float32), layout)


keys_of = jit(row_keys, static_argnums=2)


@functools.cache
def drawer(sampling):
    return jit(
        lambda z_BV, keys_B: draw(
            z_BV, keys_B, sampling.temperature, sampling.top_k, sampling.top_p
        )
    )


def draw_rows(mesh, z_BV, sampling):
    """Draws a token per row, all rows under different ids."""
    id_P = sharding.put(mesh, np.arange(z_BV.shape[0]).astype(np.uint32))
    keys_B = keys_of(jax.random.key(0), id_P, 1)
    return jax.device_get(drawer(sampling)(z_BV, keys_B))


@pytest.mark.parametrize(
    ("vocab", "width"), [(16, 1), (192, 3), (320, 5), (49_152, 192), (151_936, 1187), (50_257, 29)]
)
def test_blocks_divide_the_vocabulary_and_are_few(vocab, width):
    assert block_width(vocab) == width
    assert vocab % width == 0
    if vocab % 64 == 0:
        assert block_width(vocab, 64) == width  # The same tokens on 64 devices.


def test_blocks_leave_the_distribution_and_the_noise_of_a_row_as_they_are(mesh, mesh_2x2x2):
    z_V = np.random.default_rng(1).normal(size=192) * 1.5
    z_V[3:6], z_V[10] = -np.inf, -np.inf  # A whole block and part of one.
    plain = Sampling(1, 1, temperature=0.7)
    with jax.set_mesh(mesh):
        token_B, logp_B = draw_rows(mesh, lay_logits(mesh, np.tile(z_V, (40_000, 1))), plain)
    p_V = np.exp(z_V / 0.7) / np.exp(z_V / 0.7).sum()
    np.testing.assert_allclose(logp_B, np.log(p_V[token_B]), atol=1e-5)
    often = p_V * 40_000 > 5
    assert often.sum() > 100
    counts = np.bincount(token_B, minlength=192)[often]
    assert chi_square(counts, p_V[often] / p_V[often].sum()) < 4
    # Control: within its block, every token as often.
    flat_V = np.repeat(p_V.reshape(-1, 3).mean(-1), 3)
    assert chi_square(counts, flat_V[often] / flat_V[often].sum()) > 4
    np.testing.assert_array_equal(
        draw_rows(mesh_2x2x2, lay_logits(mesh_2x2x2, np.tile(z_V, (40_000, 1))), plain)[0], token_B
    )


def test_s07_temperature_0_is_the_lowest_of_the_likeliest_tokens(mesh, mesh_2x2x2):
    z = np.random.default_rng(0).normal(size=(8, 16))
    z[:, 3] = z[:, 12] = z.max(-1) + 1  # A tie between the two shards of the vocabulary.
    z[4:, 2] = -np.inf
    # Of the distribution before it is sharpened.
    want = z[:, 3] - np.log(np.exp(z).sum(-1))
    for m in (mesh, mesh_2x2x2):
        with jax.set_mesh(m):
            token_B, logp_B = draw_rows(m, lay_logits(m, z), GREEDY)
            assert token_B.tolist() == [3] * 8
            np.testing.assert_allclose(logp_B, want, atol=1e-5)
            # Control: without the tie, by the least that fp32 can tell apart.
            above = z + 1e-6 * (np.arange(16) == 12)[None, :]
            assert draw_rows(m, lay_logits(m, above), GREEDY)[0].tolist() == [12] * 8


def test_s07_greedy_equals_the_argmax_of_a_full_forward_at_each_step(mesh):
    params, prompt = tiny.params(mesh, C), prompts(mesh, 3)
    rollout = run(mesh, GREEDY, prompt=prompt)
    rows, lengths = tiny.whole_rows(prompt, rollout.tokens_BR)
    forward = jit(lambda p, t, n: transformer.forward(p, C, t, n))
    z = np.asarray(forward(params, rows, lengths)) @ np.asarray(params["embedding"]).T
    best = np.stack([x[n - 7 : n - 1].argmax(-1) for x, n in zip(z, lengths, strict=True)])
    np.testing.assert_array_equal(rollout.tokens_BR, best)
    # The samples of a prompt are all alike, whatever the key.
    np.testing.assert_array_equal(rollout.tokens_BR[::2], rollout.tokens_BR[1::2])
    assert off(mesh, rollout, params) < 1e-5
    # Control: sampled tokens are not the likeliest.
    assert (run(mesh).tokens_BR[:6] != best).any(-1).all()


@functools.cache
def filterer(top_k, top_p):
    return jit(lambda z_BV: keep_likeliest(z_BV, top_k, top_p))


def kept(mesh, p, top_k=0, top_p=1.0):
    """Ids that survive the filter under probabilities p."""
    z_BV = filterer(top_k, top_p)(lay_logits(mesh, np.log([p])))
    z_V, keep_V = np.asarray(z_BV[0]), np.isfinite(np.asarray(z_BV[0]))
    np.testing.assert_allclose(z_V[keep_V], np.log(p)[keep_V], atol=1e-6)
    return np.flatnonzero(keep_V).tolist()


@pytest.mark.parametrize(
    ("p", "top_p", "want"),
    [
        ([0.5, 0.41, 0.09], 0.9, [0, 1]),
        ([0.4, 0.3, 0.2, 0.1], 0.8, [0, 1, 2]),
        ([0.5, 0.3, 0.15, 0.05], 0.6, [0, 1]),
        ([0.5, 0.3, 0.15, 0.05], 0.8, [0, 1]),  # The mass is reached and not crossed.
        ([0.45, 0.35, 0.15, 0.05], 0.8, [0, 1]),  # In fp32 the mass is a rounding below.
        ([0.25] * 4, 0.5, [0, 1]),  # Of equal tokens the lower ids.
        ([0.05, 0.15, 0.3, 0.5], 0.6, [2, 3]),  # Not in order of id.
        ([0.5, 0.3, 0.15, 0.05], 1.0, [0, 1, 2, 3]),
        ([0.5, 0.3, 0.15, 0.05], 1e-9, [0]),  # One token stays at any p.
    ],
)
def test_s09_the_token_that_crosses_top_p_stays(mesh, p, top_p, want):
    assert kept(mesh, p, top_p=top_p) == want


@pytest.mark.parametrize(
    ("p", "top_k", "want"),
    [
        ([0.1, 0.2, 0.3, 0.4], 1, [3]),
        ([0.1, 0.2, 0.3, 0.4], 2, [2, 3]),
        ([0.1, 0.2, 0.3, 0.4], 4, [0, 1, 2, 3]),
        ([0.1, 0.2, 0.3, 0.4], 5, [0, 1, 2, 3]),
        ([0.1, 0.2, 0.3, 0.4], 0, [0, 1, 2, 3]),
        ([0.25] * 4, 2, [0, 1]),
        ([0.1, 0.3, 0.3, 0.3], 2, [1, 2]),
    ],
)
def test_s11_top_k_keeps_k_tokens(mesh, p, top_k, want):
    assert kept(mesh, p, top_k=top_k) == want


def test_s11_filters_on_a_sharded_vocabulary(mesh_2x2x2):
    z = np.log(np.random.default_rng(0).dirichlet(np.full(16, 0.3), size=8))
    z_BV = filterer(3, 0.5)(lay_logits(mesh_2x2x2, z))
    assert z_BV.sharding.spec == sharding.spec("batch", "vocab")
    p = np.exp(z)
    likelier = (p[:, None, :] > p[:, :, None]) * p[:, None, :]
    keep = ((likelier > 0).sum(-1) < 3) & (likelier.sum(-1) < 0.5)
    np.testing.assert_array_equal(np.isfinite(z_BV), keep)
    assert 8 < keep.sum() < 24


def test_s11_top_k_of_one_is_greedy(mesh):
    z_BV = lay_logits(mesh, np.random.default_rng(0).normal(size=(8, 16)))
    token_B, logp_B = draw_rows(mesh, z_BV, Sampling(1, 1, top_k=1))
    np.testing.assert_array_equal(token_B, np.asarray(z_BV).argmax(-1))
    np.testing.assert_allclose(logp_B, np.zeros(8), atol=1e-6)


@pytest.mark.parametrize(
    "bad",
    [
        {"samples": 0}, {"max_new_tokens": 0}, {"temperature": -1.0}, {"top_k": -1},
        {"top_p": 0.0}, {"top_p": 1.1}, {"temperature": float("nan")},
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(bad):
    with pytest.raises(ValueError, match=rf"sampling\.{next(iter(bad))}="):
        Sampling(**{"samples": 1, "max_new_tokens": 1} | bad)


# Shapes and cost.


class Letters:
    """A tokenizer of one token per letter."""

    pad_id, bos_id, stop_ids = 0, None, (1,)

    def encode_prompt(self, text):
        return [2 + ord(c) % 30 for c in text]


def batches(buckets):
    """Ten prompts of 5 to 14 letters, one to a batch."""
    for n in range(5, 15):
        problem = Problem("letters", n, 1, "abcdefghijklmn"[:n], "", {})
        yield encode_prompts([problem], ["letters"], Letters(), buckets=buckets)


def test_s01_buckets_bound_the_number_of_programs(mesh):
    jitted = jit(lambda p, b, k: sample(p, C, b, k, Sampling(1, 1)))
    for batch in batches(buckets=(8, 16)):
        jitted(tiny.params(mesh, C), sharding.put(mesh, batch), jax.random.key(0))
    assert jitted._cache_size() == 2
    # Control: without buckets there is one for every length.
    jitted = jit(lambda batch: batch.length_P + 1)
    for batch in batches(buckets=range(5, 15)):
        jitted(sharding.put(mesh, batch))
    assert jitted._cache_size() == 10


def test_s03_a_batch_of_one_is_like_any_other(mesh):
    one, two, three = (
        run(mesh, GREEDY, prompt=prompts(mesh, n, stop=(5, 14, 20, 27, 30))) for n in (1, 2, 3)
    )
    assert not three.mask_BR.all()
    for name in ("tokens_BR", "mask_BR", "length_B", "stopped_B"):
        np.testing.assert_array_equal(getattr(one, name), getattr(three, name)[:2])
        np.testing.assert_array_equal(getattr(two, name), getattr(three, name)[:4])
    # Control: the next prompt's completion is another.
    assert (three.tokens_BR[0] != three.tokens_BR[2]).any()


def test_the_sizes_of_long_rollouts():
    assert phases(rows=64, samples=8, prompt_tokens=16, new_tokens=1) == []
    assert phases(64, 8, 16, 511) == [(64, 510)]
    growing = [(64, 128), (64, 256), (64, 511)]
    assert phases(64, 8, 16, 512) == [*growing, (32, 511), (16, 511), (8, 511)]
    # 8 rows are the fewest.
    assert phases(20, 4, 16, 512)[3:] == [(10, 511)]
    # Half the rows would read 32 * (511 + 600) columns, not 64 * (511 + 600 / 8).
    assert 32 * (511 + 600) < 64 * (511 + 600 / 8)
    assert phases(64, 8, 600, 512)[3][0] == 32
    # With prompts of 900 tokens a quarter is the first that pays.
    assert phases(64, 8, 900, 512)[3:] == [(16, 511), (8, 511)]


@functools.cache
def sampler_by(long, samples):
    """A sampler of up to ten tokens, in batches of any size, where `long` tokens are many."""
    ten = Sampling(samples, max_new_tokens=10)

    def draw(params, prompt, key):
        with pytest.MonkeyPatch.context() as patch:  # Read while tracing.
            patch.setattr("opd_jax.rollout.LONG", long)
            patch.setattr("opd_jax.rollout.FEWEST", 1)
            return sample(params, C, prompt, key, ten)

    return jit(draw)


def draw_by(prompt, params, key, long, samples):
    return jax.device_get(sampler_by(long, samples)(params, prompt, jax.random.key(key)))


@pytest.mark.parametrize("samples", [2, 1])
@pytest.mark.parametrize("stop", [(), (3, 4, 5), (1, 2, 3, 4, 5, 6, 7, 8)])
def test_a_cache_that_grows_and_a_batch_that_shrinks_change_nothing(mesh, samples, stop):
    params, prompt = tiny.params(mesh, C), prompts(mesh, stop=stop)
    for key in range(3):
        args = prompt, params, key
        whole, steps = draw_by(*args, 11, samples)
        parts, same_steps = draw_by(*args, 10, samples)
        assert steps == same_steps
        same = functools.partial(jax.tree.map, np.testing.assert_array_equal)
        same((parts.tokens_BR, parts.mask_BR, parts.stopped_B, parts.length_B),
             (whole.tokens_BR, whole.mask_BR, whole.stopped_B, whole.length_B))  # fmt: skip
        np.testing.assert_allclose(parts.logp_BR, whole.logp_BR, atol=1e-5)


def test_rows_that_go_on_keep_what_is_theirs_on_eight_devices(mesh, mesh_2x2x2):
    """Each device's share shrinks by itself; the last size is a row of eight."""
    lengths, stop = (6, 3, 4, 1, 2, 5, 3, 6), [3, 4, 5, 6, 7]
    drawn = {}
    for name, where in (("one", mesh), ("eight", mesh_2x2x2)):
        with jax.set_mesh(where):
            args = tiny.prompts(where, lengths=lengths, stop=stop), tiny.params(where, C), 5
            drawn[name], _ = draw_by(*args, 10, 4)
            if name == "one":
                drawn["whole"], _ = draw_by(*args, 11, 4)
    length_B = drawn["whole"].length_B
    assert length_B.min() < 3 < length_B.max()  # The halves are reached at different steps.
    for name in ("one", "eight"):
        np.testing.assert_array_equal(drawn[name].tokens_BR, drawn["whole"].tokens_BR)
        np.testing.assert_array_equal(drawn[name].mask_BR, drawn["whole"].mask_BR)


def test_loops_run_fewer_rows_and_see_each_rows_own_prompt(mesh, monkeypatch):
    sizes, decode = [], transformer.decode

    def spy(top, layers, config, token_B, t, length_B, cache, prefix):
        sizes.append((token_B.shape[0], cache[0].v.shape[2], prefix.mask_PL.shape[0]))
        return decode(top, layers, config, token_B, t, length_B, cache, prefix)

    monkeypatch.setattr(transformer, "decode", spy)
    monkeypatch.setattr("opd_jax.rollout.LONG", 10)
    monkeypatch.setattr("opd_jax.rollout.FEWEST", 2)
    args = tiny.params(mesh, C), prompts(mesh), jax.random.key(0)
    jax.eval_shape(lambda p, *rest: sample(p, C, *rest, Sampling(4, 10)), *args)
    # Rows, columns, prompts: four for 16 rows, then one each.
    want = [(16, 3, 4), (16, 5, 4), (16, 9, 4), (8, 9, 8), (4, 9, 4), (2, 9, 2)]
    assert list(dict.fromkeys(sizes)) == want


def test_samples_share_the_prefill_of_their_prompt(mesh):
    def program(lengths, samples):
        prompt = tiny.prompts(mesh, lengths=lengths, columns=11)
        args = (tiny.params(mesh, C), prompt, jax.random.key(0))
        return sampler(C, Sampling(samples, 3)).lower(*args).as_text()

    shared = program((9, 2, 5), samples=7)
    assert "tensor<3x11x" in shared
    assert "tensor<21x11x" not in shared
    # Control: 21 prompts of one sample each do prefill 21 rows.
    assert "tensor<21x11x" in program((9, 2, 5) * 7, samples=1)
