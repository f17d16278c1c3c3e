"""The sampler: prompts in, completions out, in one jitted program.

Every unique prompt is prefilled once, whatever the number of samples, and its keys and values are
shared by them. All completions start in column 0 of their own cache, so one decode step runs token
t of every row. Long completions differ in length, and rows that have stopped leave the batch, half
of it at a time; the loop ends with the last one. The sampler knows token ids only.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct

from opd_jax import choice, scoring
from opd_jax.core import sharding
from opd_jax.core.types import Params, PromptBatch, Rollout
from opd_jax.models import transformer
from opd_jax.models.config import ModelConfig
from opd_jax.models.layers import KV, Prefix

TABLES = ("embedding", "head")  # Parameters that hold a row for every token.
# Completions of so many tokens are decoded in a batch and a cache of several sizes, see `phases`.
LONG = 512
FEWEST = 8  # Rows per device of the smallest batch: with fewer a step would take as long.


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How completions are drawn."""

    samples: int  # n, per prompt.
    max_new_tokens: int  # R, the stop token included.
    temperature: float = 1.0  # 0: the likeliest token, ties to the lowest id.
    top_k: int = 0  # Keep the k likeliest tokens; 0 or at least V: no filter.
    top_p: float = 1.0  # Keep tokens until their mass reaches p, the crossing one included.

    def __post_init__(self):
        for name in ("samples", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"sampling.{name}={getattr(self, name)}: must be at least 1")
        if not self.temperature >= 0:
            raise ValueError(f"sampling.temperature={self.temperature}: must not be negative")
        if self.top_k < 0:
            raise ValueError(f"sampling.top_k={self.top_k}: must not be negative (0: no filter)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p={self.top_p}: must be in (0, 1]")

    def check_trainable(self) -> None:
        """Raises ValueError where a policy gradient on such samples would be wrong.

        The scorer reports log-probs over the whole vocabulary, so a truncated distribution would
        give ratios other than 1 on the very weights that sampled; greedy samples have no spread.
        """
        if self.top_k or self.top_p < 1:
            raise ValueError(
                f"sampling.top_k={self.top_k}, top_p={self.top_p}: truncated sampling biases the "
                "training ratio; use top_k=0 and top_p=1 in training (evaluation may truncate)"
            )
        if self.temperature == 0:
            raise ValueError(
                "sampling.temperature=0: greedy samples of a prompt are all alike and carry no "
                "signal; use a positive temperature in training"
            )


@struct.dataclass
class Drawn:
    """Tokens of completions as in a Rollout: masked columns are 0."""

    tokens_BR: jax.Array
    logp_BR: jax.Array
    mask_BR: jax.Array
    stopped_B: jax.Array


@struct.dataclass
class Rows:
    """What the rows of a batch are drawn with; it stays as it is while tokens come."""

    home_B: jax.Array  # int32, their places in their device's share of the whole batch.
    key_B: jax.Array
    stop_BS: jax.Array
    length_B: jax.Array  # Of the prompts.
    prefix: Prefix  # Of P prompts with B / P rows each.


@struct.dataclass
class DecodeState:
    """What the decode loop carries. Column t is the last one written."""

    t: jax.Array  # int32 scalar.
    token_B: jax.Array  # int32, the token in column t; feeds the next step.
    done_B: jax.Array  # bool; a done row is frozen: its columns stay 0.
    cache: list[KV]  # The rows' own keys and values, filled up to column t-1.
    drawn: Drawn


def sample(
    params: Params,
    config: ModelConfig,
    prompt: PromptBatch,
    key: jax.Array,
    sampling: Sampling,
) -> tuple[Rollout, jax.Array]:
    """Draws `samples` completions of every prompt.

    Args:
      params: the policy's parameters.
      config: its shape.
      prompt: P left-padded prompts.
      key: the step's key; each row folds in its problem's id and its sample number.
      sampling: how to draw.

    Returns:
      The Rollout, and the number of decode steps that the loop took (int32 scalar).
    """
    n, R = sampling.samples, sampling.max_new_tokens
    P, L = prompt.tokens_PL.shape
    B, shards = P * n, sharding.axis_size(sharding.BATCH)
    # Whole along `fsdp` before the loop: inside it every token would gather all weights again.
    layers = sharding.gathered(transformer.unstack(params, config))
    tables = {name: x.astype(config.dtype) for name, x in params.items() if name in TABLES}
    top = {"final_norm": params["final_norm"]} | sharding.gathered(tables)
    table_VD = transformer.unembedding(top)
    last_PD, prefix = transformer.prefill(params, config, prompt.tokens_PL, prompt.length_P)

    def zeros(dtype, *shape):
        layout = sharding.spec("batch", *(None,) * (len(shape) - 1))
        return jnp.zeros(shape, dtype, out_sharding=layout)

    def logits(hidden_BD: jax.Array) -> jax.Array:
        return scoring.logits(
            hidden_BD[:, None], table_VD, softcap=config.final_softcap, tokens=config.num_tokens
        )[:, 0]

    def choose(z_BV: jax.Array, s: DecodeState, rows: Rows) -> DecodeState:
        """Draws the tokens of column t from their logits and records them."""
        noise_B = jax.vmap(jax.random.fold_in, (0, None))(rows.key_B, s.t)
        token_B, logp_B = choice.draw(
            z_BV, noise_B, sampling.temperature, sampling.top_k, sampling.top_p
        )
        going_B = ~s.done_B
        token_B = jnp.where(going_B, token_B, 0)
        stop_B = going_B & (token_B[:, None] == rows.stop_BS).any(-1)

        def write(x_BR, column_B):
            return jax.lax.dynamic_update_slice(x_BR, column_B[:, None], (0, s.t))

        drawn = Drawn(
            tokens_BR=write(s.drawn.tokens_BR, token_B),
            logp_BR=write(s.drawn.logp_BR, jnp.where(going_B, logp_B, 0)),
            mask_BR=write(s.drawn.mask_BR, going_B),
            stopped_B=s.drawn.stopped_B | stop_B,
        )
        return s.replace(token_B=token_B, done_B=s.done_B | stop_B, drawn=drawn)

    def advance(s: DecodeState, rows: Rows) -> DecodeState:
        hidden_BD, cache = transformer.decode(
            top, layers, config, s.token_B, s.t, rows.length_B, s.cache, rows.prefix
        )
        return choose(logits(hidden_BD), s.replace(t=s.t + 1, cache=cache), rows)

    places_B = jnp.tile(jnp.arange(B // shards, dtype=jnp.int32), shards)
    rows = Rows(
        home_B=jax.sharding.reshard(places_B, sharding.spec("batch")),
        key_B=row_keys(key, prompt.id_P, n),
        stop_BS=transformer.repeat_rows(prompt.stop_PS, n),
        length_B=transformer.repeat_rows(prompt.length_P, n),
        prefix=transformer.unstack_prefix(prefix),
    )
    state = DecodeState(
        t=jnp.int32(0),
        token_B=zeros(jnp.int32, B),
        done_B=zeros(bool, B),
        cache=transformer.empty_cache(config, B, 0),
        drawn=Drawn(
            tokens_BR=zeros(jnp.int32, B, R),
            logp_BR=zeros(jnp.float32, B, R),
            mask_BR=zeros(bool, B, R),
            stopped_B=zeros(bool, B),
        ),
    )
    first_PV = logits(last_PD)
    first_BV = jnp.repeat(first_PV, n, axis=0, out_sharding=sharding.spec("batch", "vocab"))
    state = choose(first_BV, state, rows)
    whole, plan, filled = state.drawn, phases(B // shards, n, L, R), 0
    for share, columns in plan:
        if share * shards < state.done_B.shape[0]:
            whole = put_back(whole, state.drawn, rows.home_B)
            state, rows = keep_unfinished(state, rows, share)
        state = state.replace(cache=transformer.grow(state.cache, columns))
        smaller = max((s for s, _ in plan if s < share), default=0)

        def goes_on(s: DecodeState, columns=columns, smaller=smaller) -> jax.Array:
            return (s.t < columns) & (most_unfinished(s.done_B) > smaller)

        # In profiles, and for tools/aot: how long the loop is if no row stops early.
        with jax.named_scope(f"decode_{share}_rows_trips_{columns - filled}"):
            state = jax.lax.while_loop(goes_on, functools.partial(advance, rows=rows), state)
        filled = columns
    whole = put_back(whole, state.drawn, rows.home_B)
    rollout = Rollout(
        prompt=prompt,
        tokens_BR=whole.tokens_BR,
        mask_BR=whole.mask_BR,
        logp_BR=whole.logp_BR,
        length_B=whole.mask_BR.sum(-1, dtype=jnp.int32),
        stopped_B=whole.stopped_B,
    )
    return rollout, state.t


def phases(rows: int, samples: int, prompt_tokens: int, new_tokens: int) -> list[tuple[int, int]]:
    """The decode loops of a rollout, one after the other: rows per device, columns of the cache.

    Attention reads all columns, filled or not, so a long cache grows: a quarter, a half, all of it.
    Two thirds of the reads of one loop if every row goes to its end, a quarter if most stop early.
    The last token has no column, since it predicts nothing.

    Then the batch shrinks: a loop of half the rows takes over once no more go on, of a quarter, of
    an eighth. With lengths that fall off exponentially, a quarter of the limit in the mean, a third
    of the rows of one loop are run. Each row of a smaller batch has a copy of its prompt's keys and
    values; where these are long, that costs more than half of the rows save, and the size is left
    out. Every loop is a program of its own to compile.

    Args:
      rows: of the whole batch, per device.
      samples: rows that share a prompt.
      prompt_tokens: L, padding included.
      new_tokens: R.
    """
    whole = new_tokens - 1
    if not whole:
        return []
    if new_tokens < LONG:
        return [(rows, whole)]
    found = [(rows, -(-whole // part)) for part in (4, 2, 1)]
    reads = rows * (whole + prompt_tokens / samples)
    for part in (2, 4, 8):
        share = -(-rows // part)
        if share >= FEWEST and share * (whole + prompt_tokens) < reads:
            found.append((share, whole))
            reads = share * (whole + prompt_tokens)
    return found


def most_unfinished(done_B: jax.Array) -> jax.Array:
    """How many rows go on, on the device where they are most."""
    shards = sharding.axis_size(sharding.BATCH)
    by_device = sharding.spec("batch", None)
    going_Sb = jnp.reshape(~done_B, (shards, -1), out_sharding=by_device)
    return going_Sb.sum(1).max()


def keep_unfinished(s: DecodeState, rows: Rows, share: int) -> tuple[DecodeState, Rows]:
    """A batch of `share` rows per device, the unfinished first, each with its prompt to itself."""
    batch = sharding.spec("batch")
    n = s.done_B.shape[0] // rows.prefix.mask_PL.shape[0]
    index_b = jax.shard_map(
        lambda done_B: jnp.argsort(done_B, stable=True)[:share].astype(jnp.int32),
        in_specs=batch, out_specs=batch,
    )(s.done_B)  # fmt: skip

    def take(tree, index_b):
        return _by_device(lambda i, x: x[i], index_b, tree)

    kept = take((s.token_B, s.done_B, s.cache, s.drawn), index_b)
    state = DecodeState(s.t, *kept)
    own = take((rows.home_B, rows.key_B, rows.stop_BS, rows.length_B), index_b)
    return state, Rows(*own, take(rows.prefix, index_b // n))


def put_back(whole: Drawn, part: Drawn, home_b: jax.Array) -> Drawn:
    """The whole batch with some of its rows written anew."""
    return _by_device(lambda i, x, new: x.at[i].set(new), home_b, whole, part)


def _by_device(move, index_b: jax.Array, *trees):
    """`move`, which picks rows by index within a device's share, for every leaf of the trees."""
    batch = sharding.spec("batch")

    def leaf(*xs):
        specs = tuple(jax.typeof(x).sharding.spec for x in xs)
        return jax.shard_map(move, in_specs=(batch, *specs), out_specs=specs[0])(index_b, *xs)

    return jax.tree.map(leaf, *trees)


def row_keys(key: jax.Array, id_P: jax.Array, n: int) -> jax.Array:
    """One key per row, `[P * n]`: a function of the step's key, the problem's id, the sample.

    So a row draws the same tokens wherever it stands in the batch and on whichever host.
    """
    id_B = transformer.repeat_rows(id_P, n)
    sample_P_n = jnp.broadcast_to(jnp.arange(n, dtype=jnp.uint32)[None, :], (id_P.shape[0], n))
    sample_B = jax.sharding.reshard(sample_P_n.reshape(-1), sharding.spec("batch"))

    def one(id, i):
        return jax.random.fold_in(jax.random.fold_in(key, id), i)

    return jax.vmap(one)(id_B, sample_B)
