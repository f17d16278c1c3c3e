"""Named random streams. Nothing random is saved: a key is a function of (seed, step, purpose)."""

import zlib

import jax

# Fixed names, so that a typo cannot open a new stream in silence.
PURPOSES = ("init", "rollout", "evaluate", "generate", "control")


def stream(seed: int, purpose: str, step: int | jax.Array = 0) -> jax.Array:
    """The key of one purpose at one step.

    Args:
      seed: the experiment's seed.
      purpose: one of PURPOSES.
      step: the update about to be made (or 0 where there is none).

    Returns:
      A typed PRNG key. The same three arguments give the same key on every host and after resume;
      rows differ because their ids are folded in by the sampler (see `rollout.row_keys`).
    """
    if purpose not in PURPOSES:
        raise ValueError(f"unknown random purpose {purpose!r}; one of {', '.join(PURPOSES)}")
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(purpose.encode()))
    return jax.random.fold_in(key, step)
