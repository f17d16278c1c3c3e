import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opd_jax import scoring
from opd_jax.core import sharding

B, R, D, V, K = 8, 10, 16, 416, 5
MESHES = {"2x2x2": (2, 2, 2), "1x2x4": (1, 2, 4)}


@functools.cache
def host_arrays(vocab=V, columns=R):
    """Hidden states, unembedding and tokens as numpy; logits of a few nats."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(B, columns, D)).astype(np.float32)
    table = (rng.normal(size=(vocab, D)) / 2).astype(np.float32)
    return hidden, table, rng.integers(0, vocab, (B, columns)).astype(np.int32)


def lay(mesh, hidden, table, tokens):
    """Hidden states, table and tokens in the layouts that the scorer takes."""
    table = jax.device_put(jnp.asarray(table), sharding.sharding(mesh, "vocab", "embed"))
    return sharding.put(mesh, jnp.asarray(hidden)), table, sharding.put(mesh, tokens)


def arrays(mesh, **shape):
    return lay(mesh, *host_arrays(**shape))


def lay_logits(mesh, z):
    """Logits `[B, C, V]` in the layout that `scoring.logits` gives them."""
    layout = sharding.sharding(mesh, "batch", None, "vocab")
    return jax.device_put(jnp.asarray(z, jnp.float32), layout)


def naive(hidden, table, tokens, temperature=1.0, k=0, xp=jnp):
    """The definitions, over all of `[B, R, V]` at once."""
    z = xp.einsum("brd,vd->brv", hidden, table) / temperature
    top = z.max(-1, keepdims=True)
    logp_all = z - top - xp.log(xp.exp(z - top).sum(-1, keepdims=True))
    logp = xp.take_along_axis(logp_all, tokens[..., None], axis=-1)[..., 0]
    entropy = -(xp.exp(logp_all) * logp_all).sum(-1)
    ids = xp.argsort(-z, axis=-1, stable=True)[..., :k]
    return logp, entropy, ids, xp.take_along_axis(logp_all, ids, axis=-1)


def exact(*args, **kwargs):
    """The same in float64."""
    hidden, table, tokens = (np.asarray(x) for x in args)
    return naive(hidden.astype(np.float64), table.astype(np.float64), tokens, xp=np, **kwargs)


def agrees(scores, want, atol=1e-5):
    """Whether Scores equal the four arrays of `naive`."""
    got = (scores.logp_BR, scores.entropy_BR, scores.top_ids_BRk, scores.top_logp_BRk)
    return all(
        a.shape == b.shape and np.allclose(a, b, rtol=0, atol=atol)
        for a, b in zip(map(np.asarray, got), want, strict=True)
    )


@functools.cache
def scorer(**options):
    return jax.jit(functools.partial(scoring.score, **options))


def weighted(logp_BR, entropy_BR):
    """A loss that sees every log-prob and entropy with a weight of its own."""
    weight_BR = np.random.default_rng(3).normal(size=(2, *logp_BR.shape)).astype(np.float32)
    return (weight_BR[0] * logp_BR + weight_BR[1] * entropy_BR).sum()


@functools.cache
def grad_of_scores(tile_rows, top_k=0, temperature=1.0):
    """jitted (hidden, table, tokens) -> (gradients of hidden and table, Scores)."""

    def loss(hidden, table, tokens):
        s = scoring.score(
            hidden, table, tokens, temperature=temperature, top_k=top_k, tile_rows=tile_rows
        )
        return weighted(s.logp_BR, s.entropy_BR), s

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))


@functools.cache
def grad_of_naive(entropy=True, temperature=1.0):
    def loss(hidden, table, tokens):
        logp_BR, entropy_BR, *_ = naive(hidden, table, tokens, temperature)
        return weighted(logp_BR, entropy_BR if entropy else jax.lax.stop_gradient(entropy_BR))

    return jax.jit(jax.grad(loss, (0, 1)))


def close(got, want, atol=1e-5):
    """Whether two trees of arrays agree."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return all(np.allclose(a, b, rtol=1e-5, atol=atol) for a, b in pairs)


# One tile; tiles of 5 columns; of 3, the last one ragged; of 1.
@pytest.mark.parametrize(
    ("temperature", "tile_rows"), [(1.0, None), (0.6, 40), (0.6, 24), (1.3, 1)]
)
def test_scores_equal_the_definitions(mesh, temperature, tile_rows):
    args = arrays(mesh)
    scores = scorer(temperature=temperature, top_k=K, tile_rows=tile_rows)(*args)
    assert agrees(scores, exact(*args, temperature=temperature, k=K))
    # Controls: another temperature, or tokens one column off, are seen.
    assert not agrees(scores, exact(*args, temperature=temperature + 0.1, k=K))
    hidden, table, tokens = args
    assert not agrees(scores, exact(hidden, table, jnp.roll(tokens, 1, axis=1), k=K))


@pytest.mark.parametrize("tile_rows", [None, 24])
def test_gradients_equal_naive_ones(mesh, tile_rows):
    got, _ = grad_of_scores(tile_rows, temperature=0.6)(*arrays(mesh))
    assert close(got, grad_of_naive(temperature=0.6)(*host_arrays()))
    # Control: without the gradient through the entropy.
    assert not close(got, grad_of_naive(entropy=False, temperature=0.6)(*host_arrays()))


def test_top_k_carries_no_gradient(mesh):
    hidden, table, tokens = arrays(mesh)

    def loss(hidden, part):
        return getattr(scoring.score(hidden, table, tokens, top_k=K), part).sum()

    assert not jax.jit(jax.grad(lambda h: loss(h, "top_logp_BRk")))(hidden).any()
    assert jax.jit(jax.grad(lambda h: loss(h, "logp_BR")))(hidden).any()


def test_pick_equals_indexing(mesh):
    z = np.random.default_rng(1).normal(size=(B, 3, V)).astype(np.float32)
    ids = np.random.default_rng(2).integers(0, V, (B, 3, 4)).astype(np.int32)
    ids[0, 0] = [0, V - 1, V // 2, V // 2 - 1]
    want = np.take_along_axis(z, ids, axis=-1)
    pick = jax.jit(scoring.pick)
    np.testing.assert_array_equal(pick(lay_logits(mesh, z), sharding.put(mesh, ids)), want)
    other = sharding.put(mesh, (ids + 1) % V)
    assert not np.array_equal(pick(lay_logits(mesh, z), other), want)


@pytest.mark.parametrize("shape", [(1, 1, 1), *MESHES.values()], ids=str)
@pytest.mark.parametrize("k", [1, 3, 16])
def test_top_is_exact_and_prefers_the_lower_id(shape, k):
    mesh = sharding.make_mesh(*shape, devices=jax.devices()[: np.prod(shape)])
    # Few distinct values: ties lie inside and across the shards of the vocabulary.
    z = np.random.default_rng(1).integers(0, 4, (4, 2, 16)).astype(np.float32)
    with jax.set_mesh(mesh):
        value, ids = jax.jit(scoring.top, static_argnums=1)(lay_logits(mesh, z), k)
    want = np.argsort(-z, axis=-1, stable=True)[..., :k]
    np.testing.assert_array_equal(ids, want)
    np.testing.assert_array_equal(value, np.take_along_axis(z, want, axis=-1))
    assert not np.array_equal(ids, np.argsort(z, axis=-1, stable=True)[..., :k])


def test_more_than_the_vocabulary_is_refused(mesh):
    with pytest.raises(ValueError, match=f"top_k={V + 1} is more than the vocabulary, {V} tokens"):
        jax.eval_shape(scorer(top_k=V + 1), *arrays(mesh))
    assert jax.eval_shape(scorer(top_k=V), *arrays(mesh)).top_ids_BRk.shape == (B, R, V)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_no_log_probs_at_temperatures_that_are_not_positive(mesh, temperature):
    with pytest.raises(ValueError, match=f"temperature={temperature}"):
        jax.eval_shape(scorer(temperature=temperature), *arrays(mesh))


def logp_of_first(mesh, z, **options):
    """The scorer's log-prob of token 0 where the model's logits are `z`."""
    args = lay(mesh, np.array([[z]], np.float32), np.eye(len(z)), np.array([[0]]))
    return scorer(**options)(*args).logp_BR[0, 0]


@pytest.mark.parametrize(("temperature", "want"), [(1.0, -0.126928), (2.0, -0.313262)])
def test_d15_the_teacher_is_scored_at_the_temperature_asked_for(mesh, temperature, want):
    logp = logp_of_first(mesh, [2, 0], temperature=temperature)
    np.testing.assert_allclose(logp, want, atol=1e-6)


def test_n01_logits_are_divided_by_the_temperature(mesh):
    tempered = logp_of_first(mesh, [2, 1, 0], temperature=0.5)
    np.testing.assert_allclose(tempered, -0.142932, atol=1e-6)
    # Control: the raw log-prob, and the ratio that mixing the two would give.
    raw = logp_of_first(mesh, [2, 1, 0])
    np.testing.assert_allclose(raw, -0.407606, atol=1e-6)
    np.testing.assert_allclose(jnp.exp(raw - tempered), 0.767, atol=1e-3)


def test_n09_entropy_of_a_restricted_support_is_finite(mesh):
    def entropy(z_BCV):
        return scoring.entropy(z_BCV, jax.nn.logsumexp(z_BCV, axis=-1)).sum()

    def careless(z_BCV):
        logp_BCV = jax.nn.log_softmax(z_BCV, axis=-1)
        return -(jnp.exp(logp_BCV) * logp_BCV).sum()

    z_BCV = lay_logits(mesh, [[[0.0, 0.0, -jnp.inf]]])
    entropy = jax.jit(jax.value_and_grad(entropy))
    value, grad = entropy(z_BCV)
    np.testing.assert_allclose(value, 0.693147, atol=1e-6)
    np.testing.assert_allclose(grad, np.zeros((1, 1, 3)), atol=1e-7)
    # One token left: no entropy, and nothing to gain.
    value, grad = entropy(lay_logits(mesh, [[[3.0, -jnp.inf, -jnp.inf]]]))
    assert value == 0
    assert not grad.any()
    # Log-probs of such logits are finite where the token is possible, and so are their gradients.
    tokens_BC = sharding.put(mesh, np.array([[1]]))

    def logp(z_BCV):
        return scoring.score_logits(z_BCV, tokens_BC).logp_BR.sum()

    logp, grad = jax.jit(jax.value_and_grad(logp))(z_BCV)
    np.testing.assert_allclose(logp, -0.693147, atol=1e-6)
    np.testing.assert_allclose(grad, [[[-0.5, 0.5, 0]]], atol=1e-6)
    # Control: the textbook formula is not.
    value, grad = jax.jit(jax.value_and_grad(careless))(z_BCV)
    assert np.isnan(value)
    assert np.isnan(grad).all()


def test_n12_memory_of_a_tile_and_not_of_the_vocabulary(mesh):
    plain = host_arrays(vocab=8192, columns=64)
    args = lay(mesh, *plain)

    def memory(compiled):
        return compiled.memory_analysis().temp_size_in_bytes

    def naive_scores(*args):
        return naive(*args)[:2]

    whole = jax.jit(naive_scores).lower(*plain).compile()
    tiled = scorer(tile_rows=32).lower(*args).compile()
    assert memory(tiled) < memory(whole) / 4
    scores = tiled(*args)
    assert close((scores.logp_BR, scores.entropy_BR), whole(*plain))

    whole = grad_of_naive().lower(*plain).compile()
    tiled = grad_of_scores(32).lower(*args).compile()
    assert memory(tiled) < memory(whole) / 4
    assert close(tiled(*args)[0], whole(*plain))
    # Control: one tile over everything does not pass.
    one_tile = grad_of_scores(B * 64).lower(*args).compile()
    assert memory(one_tile) > memory(whole) / 4


@pytest.mark.parametrize(
    ("vocab", "columns", "widest"),
    [
        (151_936, 4096, 128),  # 1024 rows at least, whatever the vocabulary: 622 MB.
        (8192, 4096, 256),  # 64 MiB.
        (384, 4096, 1024),  # 8192 rows at most.
        (384, 96, 96),
    ],
)
def test_the_default_tile_follows_the_vocabulary(mesh, vocab, columns, widest):
    seen = []

    def tile(x_BC):
        seen.append(x_BC.shape)
        return x_BC

    x_BR = jax.ShapeDtypeStruct((8, columns), jnp.float32)
    out = jax.eval_shape(lambda x: scoring.map_tiles(tile, (x,), vocab), x_BR)
    assert out.shape == (8, columns)
    assert set(seen) == {(8, widest)}


def test_map_tiles_keeps_columns_in_place(mesh):
    x_BR = jnp.arange(B * R, dtype=jnp.float32).reshape(B, R)
    tree = {"a": x_BR, "b": jnp.stack([x_BR, -x_BR], -1)}

    def tile(tree):
        return tree["a"] * 2, tree["b"] + 1

    for tile_rows in (1, 24, 1000):
        a_BR, b_BR2 = jax.jit(lambda x, r=tile_rows: scoring.map_tiles(tile, (x,), V, r))(tree)
        np.testing.assert_array_equal(a_BR, x_BR * 2)
        np.testing.assert_array_equal(b_BR2, tree["b"] + 1)


@pytest.mark.parametrize("tile_rows", [None, 24])
def test_bf16_hidden_states_are_reduced_in_fp32(mesh, tile_rows):
    hidden, table, tokens = host_arrays()
    hidden, rounded = (4 * hidden).astype(jnp.bfloat16), table.astype(jnp.bfloat16)
    scores = scorer(top_k=K, tile_rows=tile_rows)(*lay(mesh, hidden, table, tokens))
    want = exact(hidden, rounded, tokens, k=K)
    assert {x.dtype for x in (scores.logp_BR, scores.entropy_BR)} == {jnp.dtype("float32")}
    assert agrees(scores, want, atol=2e-5)
    # Control: the same logits rounded to bf16 before the log-sum-exp.
    rough = np.asarray(jax.jit(naive)(hidden, rounded, tokens)[0], np.float32)
    assert np.abs(rough - want[0]).max() > 1e-2


def test_bf16_gradients_of_the_table_add_up_in_fp32(mesh):
    hidden, table, tokens = host_arrays()
    hidden = hidden.astype(jnp.bfloat16)

    def grad(tile_rows, table):
        args = lay(mesh, hidden, table, tokens)
        return np.asarray(grad_of_scores(tile_rows)(*args)[0][1], np.float32)

    one_tile, ten_tiles = grad(None, table), grad(1, table)
    in_bf16 = grad(1, table.astype(jnp.bfloat16))
    assert np.abs(ten_tiles - one_tile).max() < 0.01 * np.abs(one_tile).max()
    # Control: a table in bf16 loses more in the sum over tiles.
    assert np.abs(in_bf16 - one_tile).mean() > 1.3 * np.abs(ten_tiles - one_tile).mean()


def moved_vocabulary(hlo, shards):
    """Collectives of an HLO text that move logits: a whole vocabulary, or `[.., .., V / shards]`.

    The table itself, `[V / shards, D]`, may be gathered along D: it is sharded over `fsdp` too.
    """
    found = []
    names = "all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute"
    for result, name in re.findall(rf"= (.*?) ({names})(?:-start)?\(", hlo):
        for dims in re.findall(r"\w+\[([\d,]+)\]", result):
            sizes = [int(d) for d in dims.split(",")]
            if V in sizes or (len(sizes) > 2 and V // shards in sizes):
                found.append(f"{name} {sizes}")
    return found


@pytest.fixture(params=MESHES)
def sharded(request):
    """Eight devices, the vocabulary on two or on four of them."""
    mesh = sharding.make_mesh(*MESHES[request.param])
    with jax.set_mesh(mesh):
        yield mesh


@pytest.mark.parametrize("tile_rows", [None, 24])
def test_a_sharded_vocabulary_gives_the_same_and_moves_no_logits(mesh, sharded, tile_rows):
    with jax.set_mesh(mesh):
        want_grads = grad_of_naive()(*host_arrays())
    with jax.set_mesh(sharded):
        args = arrays(sharded)
        compiled = grad_of_scores(tile_rows, K).lower(*args).compile()
        grads, scores = compiled(*args)
    assert agrees(scores, exact(*host_arrays(), k=K))
    assert close(grads, want_grads)
    assert grads[1].sharding.spec == args[1].sharding.spec
    assert moved_vocabulary(compiled.as_text(), sharded.shape["tensor"]) == []


def test_control_gathered_logits_are_detected(sharded):
    def careless(hidden, table, tokens):
        z = scoring.logits(hidden, table)
        z = jax.sharding.reshard(z, sharding.spec("batch", None, None))
        logp = jax.nn.log_softmax(z, axis=-1)
        return jnp.take_along_axis(logp, tokens[..., None], axis=-1)

    text = jax.jit(careless).lower(*arrays(sharded)).compile().as_text()
    assert any("all-gather" in x for x in moved_vocabulary(text, sharded.shape["tensor"]))


def test_the_table_is_gathered_once_and_not_in_every_tile(mesh_2x2x2):
    def gathers_in_loops(score):
        hlo = jax.jit(score).lower(*arrays(mesh_2x2x2)).compile().as_text()
        return re.findall(rf'\[{V // 2},{D}\].* all-gather\(.*op_name="[^"]*/while/', hlo)

    def grad_by(table_of):
        def loss(hidden, table, tokens):
            def tile(hidden, tokens):
                return scoring.score_logits(scoring.logits(hidden, table_of(table)), tokens)

            return scoring.map_tiles(tile, (hidden, tokens), V, 24).logp_BR.sum()

        return jax.grad(loss, (0, 1))

    def loss(hidden, table, tokens):
        return scoring.score(hidden, table, tokens, tile_rows=24).logp_BR.sum()

    assert gathers_in_loops(jax.grad(loss, (0, 1))) == []
    # Control: left to the tiles, it is gathered again and again.
    assert gathers_in_loops(grad_by(lambda table: table))


@pytest.mark.parametrize("top_k", [0, K])
def test_scores_are_laid_out_as_rows(sharded, top_k):
    scores = jax.eval_shape(scorer(top_k=top_k, tile_rows=24), *arrays(sharded))
    for x in jax.tree.leaves(scores):
        assert x.sharding.spec == sharding.spec("batch", *(None,) * (x.ndim - 1))
    assert scores.top_ids_BRk.shape == (B, R, top_k)


def test_h21_the_final_softcap(mesh):
    z_V = jnp.array([10.0, 60.0, -90.0])
    got = scoring.logits(jnp.ones((1, 1, 1)), z_V[:, None], softcap=30.0)[0, 0]
    np.testing.assert_allclose(got, [9.645382, 28.920827, -29.851643], atol=1e-5)
    # The temperature divides what the cap leaves.
    half = scoring.logits(jnp.ones((1, 1, 1)), z_V[:, None], 0.5, 30.0)[0, 0]
    np.testing.assert_allclose(half, 2 * got, rtol=1e-6)
    hidden, tokens = sharding.put(mesh, (jnp.ones((1, 1, 1)), jnp.array([[0]])))
    capped = scoring.score(hidden, z_V[:, None], tokens, softcap=30.0, temperature=2.0)
    np.testing.assert_allclose(capped.logp_BR[0, 0], jax.nn.log_softmax(got / 2)[0], atol=1e-5)
    plain = scoring.score(hidden, z_V[:, None], tokens, temperature=2.0)
    assert abs(float(plain.logp_BR[0, 0] - capped.logp_BR[0, 0])) > 1
