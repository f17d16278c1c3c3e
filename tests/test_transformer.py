import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opd_jax.core import sharding
from opd_jax.models import layers, rope, transformer
from opd_jax.models.config import preset
from tests import tiny

C = tiny.CONFIG


def run_forward(params, rows, lengths):
    return np.asarray(
        jax.jit(lambda p, t, n: transformer.forward(p, C, t, n))(params, rows, lengths)
    )


def run_completion(params, prompt, tokens):
    step = jax.jit(lambda p, b, t: transformer.completion_hidden(p, C, b, t))
    return np.asarray(step(params, prompt, tokens))


def expected_hidden(params, prompt, tokens):
    """Of every completion token, from plain forwards of whole rows."""
    rows, lengths = tiny.whole_rows(prompt, tokens)
    hidden = run_forward(params, rows, lengths.astype(np.int32))
    R = tokens.shape[1]
    return np.stack([h[n - R - 1 : n - 1] for h, n in zip(hidden, lengths, strict=True)])


def test_causality_by_gradient(mesh):
    params = tiny.params(mesh)
    # Position t holds token t, so the gradient of its embedding row is that of position t.
    row = sharding.put(mesh, (np.arange(8, dtype=np.int32)[None], np.array([8], np.int32)))

    def hidden(table):
        return transformer.forward(params | {"embedding": table}, C, *row).sum((0, 2))

    grad_of = jax.jit(jax.grad(lambda table, at: (hidden(table) * at).sum()))
    for t in range(8):
        grad = np.asarray(grad_of(params["embedding"], jnp.arange(8) == t))
        moved = np.abs(grad[:8]).sum(-1) > 0
        assert moved.tolist() == [i <= t for i in range(8)]
    # Control: a sum over all positions does depend on the last token.
    assert np.abs(np.asarray(grad_of(params["embedding"], jnp.ones(8)))[7]).sum() > 0


def test_completion_behind_a_shared_prompt_equals_whole_rows(mesh):
    params, prompt = tiny.params(mesh), tiny.prompts(mesh)
    tokens = tiny.completions(mesh)
    got = run_completion(params, prompt, tokens)
    want = expected_hidden(params, prompt, tokens)
    np.testing.assert_allclose(got, want, atol=2e-5)
    # Control: another prompt of the same length changes the answer.
    other = prompt.replace(tokens_PL=(prompt.tokens_PL + 1) % 32)
    assert np.abs(run_completion(params, other, tokens) - want).max() > 0.1


def decode_all(params, prompt, tokens, shift=0):
    B, R = tokens.shape
    n = B // prompt.length_P.shape[0]

    def run(params, prompt, tokens):
        last, prefix = transformer.prefill(params, C, prompt.tokens_PL, prompt.length_P)
        each = transformer.unstack(params, C)
        cache = transformer.empty_cache(C, B, R)
        length = transformer.repeat_rows(prompt.length_P, n)
        hidden = [transformer.repeat_rows(last, n)]
        for t in range(R - 1):
            at = jnp.int32(t + shift)
            h, cache = transformer.decode(params, each, C, tokens[:, t], at, length, cache, prefix)
            hidden.append(h)
        return jnp.stack(hidden, 1)

    return np.asarray(jax.jit(run)(params, prompt, tokens))


def test_s12_cached_decode_equals_the_full_forward_at_every_position(mesh):
    params, prompt, tokens = tiny.params(mesh), tiny.prompts(mesh), tiny.completions(mesh)
    want = expected_hidden(params, prompt, tokens)
    np.testing.assert_allclose(decode_all(params, prompt, tokens), want, atol=2e-5)
    # Control: a cache written one column too far is seen.
    assert np.abs(decode_all(params, prompt, tokens, shift=1) - want).max() > 0.05


def test_s12_bf16_error_does_not_grow_with_position(mesh):
    config = C.replace(dtype="bfloat16")
    params, prompt = tiny.params(mesh), tiny.prompts(mesh)
    tokens = tiny.completions(mesh, 8, 33)

    def both(params, prompt, tokens):
        exact = transformer.completion_hidden(params, C, prompt, tokens)
        rough = transformer.completion_hidden(params, config, prompt, tokens)
        return jnp.abs(exact - rough.astype(jnp.float32)).mean((0, 2))

    error_R = np.asarray(jax.jit(both)(params, prompt, tokens))
    assert 0 < error_R.mean() < 0.02
    assert error_R[17:].mean() < 2 * error_R[:16].mean()


@pytest.mark.parametrize("length", [1, 2])
def test_s13_first_tokens_reach_the_cache(mesh, length):
    params = tiny.params(mesh)
    prompt = tiny.prompts(mesh, lengths=(length,) * 2, columns=4)
    tokens = tiny.completions(mesh, 4)
    got = decode_all(params, prompt, tokens)
    np.testing.assert_allclose(got, expected_hidden(params, prompt, tokens), atol=2e-5)


def padded(prompt, mesh, by):
    pad = np.full((prompt.length_P.shape[0], by), 7, np.int32)
    tokens = np.concatenate([pad, np.asarray(prompt.tokens_PL)], axis=1)
    return prompt.replace(tokens_PL=sharding.put(mesh, tokens))


@pytest.mark.parametrize("by", [1, 7])
def test_m11_left_padding_changes_nothing(mesh, by):
    params, prompt, tokens = tiny.params(mesh), tiny.prompts(mesh), tiny.completions(mesh)
    want = run_completion(params, prompt, tokens)
    np.testing.assert_allclose(
        run_completion(params, padded(prompt, mesh, by), tokens), want, atol=1e-5
    )
    # Control: padding that is taken for prompt does change it.
    longer = padded(prompt, mesh, by).replace(length_P=prompt.length_P + by)
    assert np.abs(run_completion(params, longer, tokens) - want).max() > 0.05


def test_m12_values_of_padding_change_nothing_and_rows_do_not_mix(mesh):
    params, tokens = tiny.params(mesh), tiny.completions(mesh)
    prompt = tiny.prompts(mesh)
    want = run_completion(params, prompt, tokens)
    pad = np.arange(6)[None, :] < 6 - np.asarray(prompt.length_P)[:, None]
    other = np.where(pad, 31, np.asarray(prompt.tokens_PL)).astype(np.int32)
    got = run_completion(params, prompt.replace(tokens_PL=sharding.put(mesh, other)), tokens)
    np.testing.assert_array_equal(got, want)
    # A row alone, without the batch around it.
    one = jax.tree.map(lambda x: x[1:2], prompt)
    np.testing.assert_allclose(run_completion(params, one, tokens[2:4]), want[2:4], atol=1e-5)
    # Right padding of whole rows.
    rows, lengths = tiny.whole_rows(prompt, tokens)
    wide = np.pad(rows, [(0, 0), (0, 3)], constant_values=9)
    a, b = run_forward(params, rows, lengths), run_forward(params, wide, lengths)
    real = np.arange(rows.shape[1])[None, :] < lengths[:, None]
    np.testing.assert_allclose(a[real], b[:, : rows.shape[1]][real], atol=1e-5)


def test_n41_a_row_with_nothing_to_see_is_finite(mesh):
    q = jnp.ones((1, 4, 2, 4))  # [B, H, T, E]
    own = layers.KV(jnp.ones((1, 2, 2, 4)), jnp.ones((1, 2, 2, 4)))
    view = layers.View(jnp.zeros((1, 2, 2)), jnp.zeros((1, 2, 2), bool), None)

    def attend(q):
        return layers.attend(q, own, view, None, 0.5, None)

    assert np.isfinite(np.asarray(attend(q))).all()
    grad = jax.grad(lambda q: attend(q).sum())(q)
    assert np.isfinite(np.asarray(grad)).all()


def test_rms_norm_by_hand():
    x = jnp.array([[[3.0, 4.0]]])
    got = layers.rms_norm(x, jnp.array([1.0, 2.0]), 0.0)
    np.testing.assert_allclose(got[0, 0], [0.848528, 2.262742], atol=1e-6)


def test_rope_turns_the_second_pair_by_its_frequency():
    angle = rope.angles(jnp.array([[0, 5]]), head_dim=8, theta=1e6)
    np.testing.assert_allclose(angle[0, 1] / 5, [1, 0.031623, 0.001, 0.000031623], rtol=1e-4)
    x = jnp.zeros((1, 1, 2, 8)).at[0, 0, 1, 0].set(1.0)  # [B, H, T, E]
    got = np.asarray(rope.rotate(x, angle))[0, 0, 1]
    np.testing.assert_allclose(got[[0, 4]], [np.cos(5), np.sin(5)], atol=1e-6)


def test_untied_head_has_its_own_table(mesh):
    config = C.replace(tie_embeddings=False)
    params = transformer.init(config, jax.random.key(0))
    assert transformer.unembedding(params) is params["head"]
    assert transformer.unembedding(tiny.params(mesh)).shape == (32, 16)


def test_presets_have_the_stated_sizes(mesh):
    def size(name, vocab):
        tree = jax.eval_shape(lambda: transformer.init(preset(name, vocab), jax.random.key(0)))
        return sum(x.size for x in jax.tree.leaves(tree))

    assert size("peer_tiny", 512) == 853_120
    assert 100_000 < size("nano", 384) < 500_000
    assert size("nano_wide", 384) > 4 * size("nano", 384)
    with pytest.raises(ValueError, match="unknown model preset 'nan'"):
        preset("nan", 384)


def test_eight_devices_equal_one(mesh, mesh_2x2x2):
    with jax.set_mesh(mesh):
        want = run_completion(tiny.params(mesh), tiny.prompts(mesh), tiny.completions(mesh))
    with jax.set_mesh(mesh_2x2x2):
        params = tiny.params(mesh_2x2x2)
        got = run_completion(params, tiny.prompts(mesh_2x2x2), tiny.completions(mesh_2x2x2))
        spec = jax.typeof(params["layers"]["q"]).sharding.spec
    np.testing.assert_allclose(got, want, atol=2e-5)
    assert spec == jax.sharding.PartitionSpec(None, "fsdp", "tensor", None)


def test_every_parameter_has_logical_axes_with_rules(mesh):
    axes = transformer.logical_axes(C.replace(tie_embeddings=False))
    leaves = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec))
    assert len(leaves) == 12
    for names in leaves:
        sharding.spec(*names)
