"""The ledger: numbers by hand, identities between phases, and XLA's own count.

XLA counts what a compiled program executes: every multiply of a masked attention square, padding,
norms and softmaxes, and the body of a loop once, however often it runs. It sees nothing of causal
halves or of rows that have stopped. So the comparison is made where the two must agree: one layer
(the scan has one trip and is inlined), one tile of the scorer, one decode step at a time, rows of
full length, and a wide model on short rows, which makes attention and all elementwise work small.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opd_jax import ledger, scoring, steps
from opd_jax.core import sharding
from opd_jax.core.types import PromptBatch, Rollout
from opd_jax.losses import Group
from opd_jax.models import lora, transformer
from opd_jax.models.config import Lora, ModelConfig
from opd_jax.optim import OptimizerSettings
from tests import batches

# One token: projections 96 + MLP 72 in each of 2 layers, head 80, 32 for every key it sees.
SMALL = ModelConfig(
    vocab_size=10, embed_dim=4, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=2, mlp_dim=3,
    max_length=16,
)  # fmt: skip
WIDE = ModelConfig(
    vocab_size=2048, embed_dim=512, num_layers=1, num_heads=8, num_kv_heads=4, head_dim=64,
    mlp_dim=1024, max_length=16,
)  # fmt: skip
P, N, L, R = 32, 4, 4, 5
PROMPTS, ROWS = np.full(P, L), np.full(P * N, R)


def test_by_hand():
    assert ledger.linear_per_token(SMALL) == 2 * (96 + 72)
    assert ledger.head_per_token(SMALL) == 80
    # Three tokens see 1 + 2 + 3 keys.
    assert ledger.prefill(SMALL, [3]) == 3 * 336 + 6 * 32 + 80
    # Of four tokens three are run; they see 4, 5 and 6 keys.
    assert ledger.decode(SMALL, [3], [4]) == 3 * 336 + 15 * 32 + 3 * 80
    # The prompt once, for two rows of 4 and 2 tokens; all six are predicted.
    score = (3 * 336 + 6 * 32) + (3 * 336 + 15 * 32) + (336 + 4 * 32) + 6 * 80
    assert ledger.score(SMALL, [3], [4, 2]) == score
    assert ledger.update(SMALL, [3], [4, 2]) == 3 * score
    assert ledger.remat(SMALL, [3], [4, 2]) == 0
    assert ledger.remat(SMALL.replace(remat="full"), [3], [4, 2]) == score - 6 * 80


def test_rows_of_one_token_and_of_none_run_nothing():
    assert ledger.decode(SMALL, [3, 3], [1, 0]) == 0
    assert ledger.score(SMALL, [3], [1, 0]) == 3 * 336 + 6 * 32 + 80


def test_sampling_costs_what_one_forward_over_the_whole_costs():
    prompt, length = np.array([3, 7, 1]), np.array([4, 1, 9])
    sampled = ledger.prefill(SMALL, prompt) + ledger.decode(SMALL, prompt, length)
    assert sampled == ledger.score(SMALL, prompt, length)
    whole = sum(
        (p + r - 1) * 336 + (p + r - 1) * (p + r) // 2 * 32 + r * 80
        for p, r in zip(prompt.tolist(), length.tolist(), strict=True)
    )
    assert sampled == whole
    # Control: a last token that is run, too, would be seen.
    assert sampled != ledger.prefill(SMALL, prompt) + ledger.decode(SMALL, prompt, length + 1)


def test_samples_share_their_prompt():
    one, two = ledger.score(SMALL, [5], [4]), ledger.score(SMALL, [5], [4, 4])
    prompt = ledger.blocks(SMALL, [0], [5])
    assert two == 2 * one - prompt
    assert prompt > 0.5 * one


def test_phases_are_checked_and_discarding_moves_without_changing_the_total():
    book = ledger.Ledger()
    book.add("decode", 100)
    book.add("update", 50)
    book.discard("decode", 30)
    assert (book.flops["decode"], book.flops["discarded"], book.total) == (70, 30, 150)
    book.add("evaluation", 1e6)
    book.add("remat", 1e6)
    assert book.total == 150
    other = ledger.Ledger()
    other.restore(book.state())
    assert other == book
    other.add("update", 1)
    assert book.total == 150
    with pytest.raises(ValueError, match="unknown ledger phase 'updates'; one of prefill"):
        book.add("updates", 1)


def test_local_layers_see_their_window_only():
    local = SMALL.replace(window=4, local_layers=(1,))
    # Prompt of 3: 1 + 2 + 3 keys in both layers. Then 3 tokens: 4 + 5 + 6, and 4 + 4 + 4.
    assert ledger.prefill(local, [3]) == ledger.prefill(SMALL, [3])
    assert ledger.decode(local, [3], [4]) == 3 * 336 + (15 + 12) * 16 + 3 * 80
    # A prompt beyond the window: 1 + 2 + 3 + 4 + 4 + 4.
    everywhere = SMALL.replace(window=4, local_layers=(0, 1))
    assert ledger.prefill(everywhere, [6]) == 6 * 336 + 18 * 32 + 80
    # Tokens that begin beyond it.
    assert ledger.blocks(everywhere, [10], [2]) == 2 * 336 + 8 * 32
    prompt, length = np.array([3, 7, 1]), np.array([4, 1, 9])
    sampled = ledger.prefill(local, prompt) + ledger.decode(local, prompt, length)
    assert sampled == ledger.score(local, prompt, length)
    assert sampled < ledger.score(SMALL, prompt, length)


def test_heads_count_by_their_size_and_a_tied_head_like_any_other():
    wide = SMALL.replace(head_dim=4)
    assert ledger.linear_per_token(wide) == 2 * (192 + 72)
    assert ledger.blocks(wide, [5], [1]) == 2 * (192 + 72) + 6 * 64
    assert ledger.head_per_token(SMALL) == ledger.head_per_token(
        SMALL.replace(tie_embeddings=False)
    )
    extras = SMALL.replace(
        qkv_bias=True, qk_norm=True, post_norms=True, attention_softcap=3.0, final_softcap=3.0
    )
    assert ledger.update(extras, [3], [4]) == ledger.update(SMALL, [3], [4])


# XLA's count.


def counted(function, *args):
    """FLOPs of the compiled program, as XLA counts them."""
    return jax.jit(function).lower(*args).compile().cost_analysis()["flops"]


def agrees(xla, mine):
    return abs(xla / mine - 1) < 0.05


@functools.cache
def inputs():
    """Shapes of parameters, prompts and completions; nothing of this size is ever run."""
    mesh = sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1])
    params = jax.eval_shape(lambda: transformer.init(WIDE, jax.random.key(0)))
    params = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        params, transformer.shardings(WIDE, mesh),
    )  # fmt: skip

    def rows(dtype, *shape):
        layout = sharding.sharding(mesh, "batch", *(None,) * (len(shape) - 1))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout)

    B = P * N
    prompt = PromptBatch(
        rows(jnp.int32, P, L), rows(jnp.int32, P), rows(jnp.int32, P), rows(jnp.uint32, P),
        rows(jnp.int32, P, 1),
    )  # fmt: skip
    rollout = Rollout(
        prompt, rows(jnp.int32, B, R), rows(bool, B, R), rows(jnp.float32, B, R),
        rows(jnp.int32, B), rows(bool, B),
    )  # fmt: skip
    return params, rollout, rows


def heads(count):
    return count * ledger.head_per_token(WIDE)


def test_prefill_agrees_with_xla(mesh):
    params, rollout, _ = inputs()

    def run(params, prompt):
        last_PD, prefix = transformer.prefill(params, WIDE, prompt.tokens_PL, prompt.length_P)
        logits = scoring.logits(last_PD[:, None], transformer.unembedding(params))
        return logits, prefix

    xla, mine = counted(run, params, rollout.prompt), ledger.prefill(WIDE, PROMPTS)
    assert agrees(xla, mine)
    # Controls: without the head, and with a head at every token.
    assert not agrees(xla, mine - heads(P))
    assert not agrees(xla, mine + heads(P * (L - 1)))


def test_decode_agrees_with_xla(mesh):
    params, _, rows = inputs()
    B, K, E = P * N, WIDE.num_kv_heads, WIDE.head_dim
    kv = jax.ShapeDtypeStruct(
        (1, P, K, L, E),
        jnp.float32,
        sharding=sharding.sharding(mesh, None, "batch", "kv_heads", None, None),
    )
    prefix = transformer.Prefix(transformer.KV(kv, kv), rows(bool, P, L))

    def run(params, token_B, t, length_B, prefix):
        layers = transformer.unstack(params, WIDE)
        prefix = transformer.unstack_prefix(prefix)
        cache = transformer.empty_cache(WIDE, B, R - 1)
        hidden, cache = transformer.decode(
            params, layers, WIDE, token_B, t, length_B, cache, prefix
        )
        return scoring.logits(hidden[:, None], transformer.unembedding(params)), cache

    lengths = rows(jnp.int32, B)
    one_step = counted(run, params, lengths, jax.ShapeDtypeStruct((), jnp.int32), lengths, prefix)
    mine = ledger.decode(WIDE, np.repeat(PROMPTS, N), ROWS)
    assert agrees((R - 1) * one_step, mine)
    # Controls: a step more (the last token predicts nothing), and no head.
    assert not agrees((R - 1) * one_step, mine * R / (R - 1))
    assert not agrees((R - 1) * one_step, mine - heads(B * (R - 1)))


def test_score_agrees_with_xla(mesh):
    params, rollout, _ = inputs()
    step = steps.make_score_step(WIDE, 1.0, 0)
    xla, mine = counted(step, params, rollout), ledger.score(WIDE, PROMPTS, ROWS)
    assert agrees(xla, mine)
    # Controls: without the head, and with the prompt once per sample.
    assert not agrees(xla, mine - heads(P * N * R))
    assert not agrees(xla, ledger.score(WIDE, np.repeat(PROMPTS, N), ROWS))


def test_frozen_weights_save_their_own_gradient_and_deltas_cost_theirs():
    config = SMALL.replace(lora=Lora(rank=3, alpha=1.0, targets=("q", "down")))
    # q is 4 -> 4 and down 3 -> 4, in two layers of rank 3.
    assert ledger.deltas_per_token(config) == 2 * 2 * 3 * (4 + 4 + 3 + 4)
    assert ledger.linear_per_token(config) == 336 + 180
    forward = ledger.score(config, [3], [4, 2])
    # Of 3 prompt and 3 + 1 completion tokens run, and 6 heads, nothing but inputs get gradients.
    assert ledger.update(config, [3], [4, 2]) == 3 * forward - (7 * 336 + 6 * 80)


def test_update_of_deltas_agrees_with_xla(mesh):
    config = WIDE.replace(lora=Lora(rank=64, alpha=1.0), remat="none")
    layout = transformer.shardings(config, mesh)
    shapes = jax.eval_shape(lambda: transformer.init(config, jax.random.key(0)))
    params = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, layout
    )
    base, delta = lora.split(params)
    _, rollout, rows = inputs()
    optimizer = OptimizerSettings()
    state = jax.eval_shape(steps.make_state(optimizer, 1), delta)
    group = Group(rollout, rows(jnp.float32, P * N, R))
    step = steps.make_update_step(config, optimizer, 1, batches.settings("supervised"), 1)
    xla = step.lower(state, [group], base).compile().cost_analysis()["flops"]
    # One layer stands alone, and its input are frozen embeddings: XLA sees that nothing asks for
    # the gradient through the first projections. In a scan of layers all are alike, and it is made.
    c = WIDE
    width = c.head_dim * (c.num_heads + 2 * c.num_kv_heads)
    tokens = PROMPTS.sum() + (ROWS - 1).sum()
    xla += float(tokens) * 2 * c.embed_dim * (width + 3 * config.lora.rank)
    assert agrees(xla, ledger.update(config, PROMPTS, ROWS))
    # Controls: as if nothing were frozen, and without the deltas.
    assert not agrees(xla, 3 * ledger.score(config, PROMPTS, ROWS))
    assert not agrees(xla, 2 * ledger.score(WIDE, PROMPTS, ROWS))


@pytest.mark.parametrize("remat", ["none", "full"])
def test_update_agrees_with_xla(mesh, remat):
    config = WIDE.replace(remat=remat)
    params, rollout, rows = inputs()
    optimizer = OptimizerSettings()
    state = jax.eval_shape(steps.make_state(optimizer, 1), params)
    group = Group(rollout, rows(jnp.float32, P * N, R))
    loss = batches.settings("supervised")
    step = steps.make_update_step(config, optimizer, 1, loss, 1)
    xla = step.lower(state, [group]).compile().cost_analysis()["flops"]
    mine = ledger.update(config, PROMPTS, ROWS) + ledger.remat(config, PROMPTS, ROWS)
    assert agrees(xla, mine)
    # Controls: one forward for the backward pass, and no head.
    forward = ledger.score(config, PROMPTS, ROWS)
    assert not agrees(xla, mine - forward)
    assert not agrees(xla, mine - 3 * heads(P * N * R))
    if remat == "full":  # And without what is computed again.
        assert not agrees(xla, ledger.update(config, PROMPTS, ROWS))
