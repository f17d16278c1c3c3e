"""Supervised fine-tuning: the same weights and sum as the other objectives, a simpler term."""

import jax


def nll_terms(logp_BR: jax.Array) -> jax.Array:
    """-log p of each target token, in nats.

    Args:
      logp_BR: log-probs the student gives the target tokens, the stop token included.

    Returns:
      Per-token loss terms, for `aggregate.weighted_sum`.
    """
    return -logp_BR
