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
        prefix = transformer.unstack_prefix(prefix)
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


# --- families ----------------------------------------------------------------------------------

# Everything that a family may add, at once: one local layer and one that sees all.
FULL = C.replace(
    qkv_bias=True, qk_norm=True, query_pre_attn_scalar=3.0, attention_softcap=2.0, window=3,
    local_layers=(1,), local_rope_theta=50.0, unit_offset_norm=True, post_norms=True,
    scale_embeddings=True, activation="gelu_tanh",
)  # fmt: skip


def full_params(mesh):
    """Biases and weights of norms start at zero: they are moved away from it."""
    rng = np.random.default_rng(5)
    params = jax.tree.map(
        lambda x: np.where(x == 0, 0.3 * rng.normal(size=x.shape), x).astype(np.float32),
        tiny.host_params(FULL),
    )
    return jax.tree.map(jax.device_put, params, transformer.shardings(FULL, mesh))


def loss_by_shared_prompts(params, prompt, tokens):
    return (transformer.completion_hidden(params, FULL, prompt, tokens)[:, 1:] ** 2).mean()


def loss_by_whole_rows(params, prompt, tokens):
    rows, lengths = tiny.whole_rows(prompt, tokens)
    hidden = transformer.forward(params, FULL, rows, lengths.astype(np.int32))
    at = (lengths[:, None] - tokens.shape[1] + np.arange(tokens.shape[1] - 1)).astype(np.int32)
    return (jnp.take_along_axis(hidden, jnp.asarray(at)[..., None], axis=1) ** 2).mean()


def test_windows_and_softcaps_have_the_gradient_of_whole_rows_behind_shared_prompts(mesh):
    # Five completion tokens and a window of three: the last ones see nothing of their prompt.
    params, prompt, tokens = full_params(mesh), tiny.prompts(mesh), tiny.completions(mesh)
    by_prompt = jax.jit(jax.value_and_grad(lambda p: loss_by_shared_prompts(p, prompt, tokens)))
    by_row = jax.jit(jax.value_and_grad(lambda p: loss_by_whole_rows(p, prompt, tokens)))
    (a, got), (b, want) = by_prompt(params), by_row(params)
    np.testing.assert_allclose(a, b, rtol=1e-5)
    for leaf, expected in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(
            leaf, expected, atol=1e-5 * float(jnp.abs(expected).max()) + 1e-7
        )
    # Control: the loss without the window is another one.
    wide = FULL.replace(window=9)
    seen = jax.jit(lambda p: transformer.completion_hidden(p, wide, prompt, tokens))(params)
    assert abs(float((seen[:, 1:] ** 2).mean()) - float(a)) > 1e-3


def test_eight_devices_equal_one_with_everything_that_families_add(mesh, mesh_2x2x2):
    def run(mesh):
        with jax.set_mesh(mesh):
            prompt, tokens = tiny.prompts(mesh), tiny.completions(mesh)
            params = full_params(mesh)
            step = jax.jit(lambda p: transformer.completion_hidden(p, FULL, prompt, tokens))
            return np.asarray(step(params))

    np.testing.assert_allclose(run(mesh_2x2x2), run(mesh), atol=2e-5)


def test_a_local_layer_sees_its_window_and_no_more(mesh):
    """By gradient: with one local layer, position t depends on t, t-1 and t-2."""
    config = C.replace(num_layers=1, window=3, local_layers=(0,))
    params = tiny.params(mesh, config)
    row = sharding.put(mesh, (np.arange(8, dtype=np.int32)[None], np.array([8], np.int32)))

    def hidden(table, at):
        out = transformer.forward(params | {"embedding": table}, config, *row).sum((0, 2))
        return (out * at).sum()

    grad_of = jax.jit(jax.grad(hidden))
    for t in (1, 5):
        grad = np.asarray(grad_of(params["embedding"], jnp.arange(8) == t))
        moved = np.abs(grad[:8]).sum(-1) > 0
        assert moved.tolist() == [t - 3 < i <= t for i in range(8)]


def test_h06_queries_and_keys_are_normed_by_head_before_they_turn(mesh):
    config = C.replace(num_layers=1, qk_norm=True)
    params = tiny.params(mesh, config)
    assert params["layers"]["q_norm"].shape == (1, config.head_dim)
    tokens = jnp.array([[3, 1, 4]])
    step = jax.jit(lambda p: transformer.prefill(p, config, tokens, jnp.array([3])))
    _, prefix = step(params)
    w = jax.tree.map(lambda x: np.asarray(x, np.float64)[0], params["layers"])
    x = np.asarray(params["embedding"], np.float64)[np.array([3, 1, 4])]
    unit = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * w["attn_norm"]
    k = np.einsum("TD,DKE->KTE", unit, w["k"])
    k = k / np.sqrt((k**2).mean(-1, keepdims=True) + config.norm_eps) * w["k_norm"]
    # Position 0 is not rotated; the size of the others is that before rotation.
    got = np.asarray(prefix.kv.k[0, 0])
    np.testing.assert_allclose(got[:, 0], k[:, 0], atol=1e-5)
    np.testing.assert_allclose(
        np.hypot(got[..., :2], got[..., 2:]), np.hypot(k[..., :2], k[..., 2:]), atol=1e-5
    )


def test_h07_norms_with_an_offset():
    x, weight = jnp.array([[[3.0, 4.0]]]), jnp.array([0.0, 1.0])
    config = C.replace(norm_eps=1e-6)
    plain = layers.norm(x, weight, config)[0, 0]
    offset = layers.norm(x, weight, config.replace(unit_offset_norm=True))[0, 0]
    np.testing.assert_allclose(plain, [0, 1.131371], atol=1e-6)
    np.testing.assert_allclose(offset, [0.848528, 2.262742], atol=1e-6)
    # At first either multiplies by 1.
    assert (tiny.host_params(FULL)["final_norm"] == 0).all()


def test_h21_the_cap_comes_before_the_mask(mesh):
    q, k = jnp.zeros((1, 1, 1, 2)), jnp.ones((1, 1, 2, 2))
    own = layers.KV(k, jnp.array([[[[1.0, 0.0], [0.0, 1.0]]]]))
    view = layers.View(jnp.zeros((1, 1, 1)), jnp.array([[[True, False]]]), None)
    weights = layers.attend(q, own, view, None, 1.0, 5.0)[0, 0, 0]
    np.testing.assert_allclose(weights, [1, 0], atol=1e-6)
    # The same keys in a prompt, and an own key that scores as much.
    view = layers.View(
        jnp.zeros((1, 1, 1)), jnp.ones((1, 1, 1), bool), jnp.array([[[True, False]]])
    )
    self_only = layers.KV(k[:, :, :1], jnp.zeros((1, 1, 1, 2)))
    weights = layers.attend(q, self_only, view, own, 1.0, 5.0)[0, 0, 0]
    np.testing.assert_allclose(weights, [0.5, 0], atol=1e-6)
    # What a mask before the cap would give, and what the cap does to one that is not masked.
    wrong = jax.nn.softmax(layers.cap_softly(jnp.array([0.0, layers.MASKED]), 5.0))
    np.testing.assert_allclose(wrong, [0.993307, 0.006693], atol=1e-6)


def test_bf16_embeddings_are_scaled_by_a_rounded_root():
    config = C.replace(embed_dim=640, dtype="bfloat16", scale_embeddings=True)
    table = jnp.ones((2, 640))
    got = transformer.embed(table, jnp.zeros((1, 1), jnp.int32), config)
    assert float(got[0, 0, 0]) == 25.25  # Of 25.298.
    got = transformer.embed(table, jnp.zeros((1, 1), jnp.int32), config.replace(dtype="float32"))
    np.testing.assert_allclose(got[0, 0, 0], 640**0.5, rtol=1e-7)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"window": 3}, "model.local_layers is empty"),
        ({"local_layers": (0,)}, "model.window=None"),
        ({"local_layers": (2,), "window": 3}, r"layers are 0\.\.1"),
        ({"local_rope_theta": 1e4}, "model.local_rope_theta=10000.0, but"),
        ({"activation": "relu"}, "model.activation='relu'"),
        ({"attention_softcap": 0.0}, "model.attention_softcap=0.0"),
        ({"local_layers": (0,), "window": 3, "local_rope_theta": 1e4,
          "rope_scaling": rope.RopeScaling("yarn", 2.0, 8, attention_factor=1.1)},
         "attention factors of their own"),
        ({"head_dim": 2, "rope_scaling": rope.RopeScaling("dynamic", 2.0, 8)}, "at least 4"),
    ],
)  # fmt: skip
def test_fields_that_contradict_each_other_are_refused(changes, named):
    with pytest.raises(ValueError, match=named):
        C.replace(**changes)
