"""Completions that end with a text instead of a token, as those of base models do."""

from collections.abc import Sequence

import numpy as np

from opd_jax.core import hosts
from opd_jax.core.types import Rollout
from opd_jax.data.tokenizer import Tokenizer


def cut_rollout(
    tokenizer: Tokenizer, rollout: Rollout, stops: Sequence[str]
) -> tuple[Rollout, list[str | None]]:
    """Ends every completion at its first stop text, and counts it as stopped.

    Args:
      tokenizer: decodes.
      rollout: as sampled; the sampler knows tokens only and has gone on.
      stops: texts that end a completion.

    Returns:
      The rollout with `mask_BR`, `length_B` and `stopped_B` as numpy arrays that agree with the
      texts, and the texts, each up to its stop text or stop token; None for rows of other hosts.
    """
    tokens_BR, own_B = hosts.local(rollout.tokens_BR), hosts.own_rows(rollout.tokens_BR)
    length_B, stopped_B = (hosts.local(x).copy() for x in (rollout.length_B, rollout.stopped_B))
    text_B: list[str | None] = [None] * len(tokens_BR)
    for b in np.flatnonzero(own_B).tolist():
        ids = tokens_BR[b, : length_B[b] - stopped_B[b]].tolist()
        count, text_B[b] = cut_at_text(tokenizer, ids, stops)
        if count is not None:
            length_B[b], stopped_B[b] = count, True
    ends_B2 = np.stack([length_B, stopped_B], axis=1)
    length_B, stopped_B = hosts.merge_rows(ends_B2, own_B, "stop texts").T
    stopped_B = stopped_B.astype(bool)
    mask_BR = np.arange(tokens_BR.shape[1])[None, :] < length_B[:, None]
    return rollout.replace(mask_BR=mask_BR, length_B=length_B, stopped_B=stopped_B), text_B


def cut_at_text(
    tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str]
) -> tuple[int | None, str]:
    """Where a completion ends that a text stops, as base models need it.

    Args:
      tokenizer: decodes.
      ids: the completion's tokens.
      stops: texts that end a completion, say "\n\nQuestion:".

    Returns:
      The number of tokens up to and with the one that completes the first stop text, and the text
      before it. All of those tokens are trained, as a stop token is: the model must learn to write
      what ends its answer. Without a stop text None and the whole text.
    """
    text = tokenizer.decode(ids, continues=True)
    starts = [at for stop in stops if (at := text.find(stop)) >= 0]
    if not starts:
        return None, text
    # Half a character at the end of a prefix is no text yet, so the search goes by prefixes.
    for count in range(1, len(ids) + 1):
        prefix = tokenizer.decode(ids[:count], continues=True)
        if any(stop in prefix for stop in stops):
            return count, text[: min(starts)]
    raise AssertionError("a stop text that is in the whole is in its last prefix")
