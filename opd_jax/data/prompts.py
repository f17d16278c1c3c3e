"""From problems to batches: exact quotas per domain, resumable order, left-padded prompts.

Everything here is numpy on the host, and everything is the same on every host: a stream gives the
whole batch, so its order does not depend on how many hosts or devices share the work.
"""

import dataclasses
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import grain
import numpy as np

from opd_jax.core.types import PromptBatch
from opd_jax.data.problem import Problem
from opd_jax.data.tokenizer import Tokenizer


def quotas(weights: Mapping[str, float], prompts: int) -> dict[str, int]:
    """Prompts of each domain in every batch.

    Args:
      weights: domain -> share, on any scale.
      prompts: prompts in a batch.

    Raises:
      ValueError: a share of the batch is not a whole number; names the nearest shares that are.
    """
    total = sum(weights.values())
    if not weights or min(weights.values()) < 0 or total <= 0 or prompts < 1:
        raise ValueError(
            f"domain weights {dict(weights)} for {prompts} prompts: weights must be at least 0 "
            "and one above 0, and there must be a prompt"
        )
    exact = {domain: prompts * weight / total for domain, weight in weights.items()}
    whole = {domain: round(share) for domain, share in exact.items()}
    if any(abs(exact[domain] - whole[domain]) > 1e-6 for domain in exact):
        nearest = _largest_remainder(exact, prompts)
        shares = ", ".join(f"{d}: {n}/{prompts}" for d, n in nearest.items())
        raise ValueError(
            f"domain weights {dict(weights)} do not split {prompts} prompts into whole numbers; "
            f"the nearest that do: {shares}"
        )
    return whole


class PromptStream(Iterator[list[Problem]]):
    """Batches of problems for ever: a fixed quota of every domain, shuffled anew each epoch.

    A batch is a list in the order of the domains, each domain's problems together. Its place is one
    number per domain, so that a restored stream goes on exactly, also across the end of an epoch
    and with another quota.
    """

    def __init__(
        self, problems: Mapping[str, Sequence[Problem]], quotas: Mapping[str, int], seed: int
    ):
        """Starts at the first batch.

        Args:
          problems: domain -> its problems; random access.
          quotas: domain -> problems in a batch; the same domains, in the order of batches.
          seed: of the shuffles.

        Raises:
          ValueError: domains differ, or a domain has fewer problems than its quota: the same
            problem would stand twice in a batch, with the same sampling noise.
        """
        if set(problems) != set(quotas):
            raise ValueError(f"problems of {sorted(problems)} but quotas of {sorted(quotas)}")
        for domain, quota in quotas.items():
            if quota > len(problems[domain]):
                raise ValueError(
                    f"domain {domain!r} has {len(problems[domain])} problems, fewer than its "
                    f"{quota} of every batch; add problems or levels, or lower its weight"
                )
        self._quotas = dict(quotas)
        self._next = dict.fromkeys(quotas, 0)
        self._data = {d: _fingerprint(problems[d]) for d in quotas}
        self._seed = seed
        self._datasets = {
            domain: grain.MapDataset.source(problems[domain])
            .seed((seed ^ _salt(domain)) % 2**32)
            .shuffle()
            .repeat()
            for domain in quotas
            if quotas[domain]
        }

    def __next__(self) -> list[Problem]:
        batch = []
        for domain, dataset in self._datasets.items():
            start = self._next[domain]
            self._next[domain] = start + self._quotas[domain]
            batch += [dataset[i] for i in range(start, self._next[domain])]
        return batch

    def state(self) -> dict[str, Any]:
        """Where the stream is, ready for JSON."""
        return {"seed": self._seed, "data": dict(self._data), "next": dict(self._next)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken.

        Raises:
          ValueError: the state is of other problems or another seed: the order would not go on.
        """
        for key, mine in (("seed", self._seed), ("data", self._data)):
            if state[key] != mine:
                raise ValueError(
                    f"the saved prompt stream has {key} {state[key]}, this run has {mine}: resume "
                    "with the same seed, domains, levels and problem files, or start a new workdir"
                )
        self._next = dict(state["next"])


def fill_template(problems: Sequence[Problem], template: str) -> list[Problem]:
    """The same problems with a domain's instructions around their texts.

    Args:
      problems: any.
      template: a text with {prompt} in it; no other brace means anything.
    """
    before, after = template.split("{prompt}")
    return [dataclasses.replace(p, prompt=f"{before}{p.prompt}{after}") for p in problems]


def prompt_tokens(problem: Problem, tokenizer: Tokenizer) -> list[int]:
    """A prompt's tokens, as the tokenizer lays them out: see Tokenizer.encode_prompt.

    Raises:
      ValueError: the prompt is empty and there is no bos: the model would have nothing to go on.
    """
    ids = tokenizer.encode_prompt(problem.prompt)
    if not ids:
        raise ValueError(
            f"problem {problem.id} of {problem.domain!r}: the prompt is empty and the tokenizer "
            "has no bos token; give the problem a prompt"
        )
    return ids


def fit_prompts(
    problems: Sequence[Problem],
    tokenizer: Tokenizer,
    limit: int,
    overflow: Literal["error", "drop"],
) -> tuple[list[Problem], int]:
    """The problems whose prompts have at most `limit` tokens, and how many were dropped.

    A prompt is never cut: half a question has another answer.

    Raises:
      ValueError: a prompt is too long and `overflow` is "error".
    """
    if overflow not in ("error", "drop"):
        raise ValueError(f"overflow={overflow!r}: one of error, drop")
    kept = []
    for problem in problems:
        length = len(prompt_tokens(problem, tokenizer))
        if length <= limit:
            kept.append(problem)
        elif overflow == "error":
            raise ValueError(
                f"problem {problem.id} of {problem.domain!r}: the prompt has {length} tokens, the "
                f"limit is {limit}; raise the limit or set overflow to 'drop'"
            )
    return kept, len(problems) - len(kept)


def encode_prompts(
    problems: Sequence[Problem],
    domains: Sequence[str],
    tokenizer: Tokenizer,
    *,
    buckets: Sequence[int],
) -> PromptBatch:
    """A PromptBatch of numpy arrays, left-padded to the smallest bucket that holds every prompt.

    Few buckets mean few shapes to compile. Padding is known from `length_P` only, so a pad token
    that is also a stop token, or stands in a prompt, hides nothing.

    Args:
      problems: P problems.
      domains: names that `domain_P` indexes.
      tokenizer: gives the tokens and the stop ids.
      buckets: allowed numbers of columns.

    Raises:
      ValueError: there is no problem, a prompt fits no bucket, or a domain is not in `domains`.
    """
    if not problems:
        raise ValueError("no problems to encode: a batch needs one at least")
    rows = [prompt_tokens(p, tokenizer) for p in problems]
    longest = max(map(len, rows))
    columns = min((b for b in buckets if b >= longest), default=None)
    if columns is None:
        long = problems[[len(row) for row in rows].index(longest)]
        raise ValueError(
            f"problem {long.id} of {long.domain!r}: the prompt has {longest} tokens, the largest "
            f"bucket is {max(buckets, default=0)}; drop such prompts with fit_prompts or add one"
        )
    tokens_PL = np.full((len(rows), columns), tokenizer.pad_id, np.int32)
    for tokens_L, row in zip(tokens_PL, rows, strict=True):
        tokens_L[columns - len(row) :] = row
    unknown = {p.domain for p in problems} - set(domains)
    if unknown:
        raise ValueError(f"problems of {sorted(unknown)}, but the domains are {list(domains)}")
    index = {domain: i for i, domain in enumerate(domains)}
    return PromptBatch(
        tokens_PL=tokens_PL,
        length_P=np.array([len(row) for row in rows], np.int32),
        domain_P=np.array([index[p.domain] for p in problems], np.int32),
        id_P=np.array([p.id ^ _salt(p.domain) for p in problems], np.uint32),
        stop_PS=np.tile(np.array(tokenizer.stop_ids, np.int32), (len(rows), 1)),
    )


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one reader of problems, say a teacher, wants its prompts."""

    tokenizer: Tokenizer  # Lays them out.
    buckets: tuple[int, ...]  # See `encode_prompts`.

    def encode(self, problems: Sequence[Problem]) -> PromptBatch:
        """The problems as `encode_prompts` makes them; `domain_P` counts their own domains."""
        names = sorted({p.domain for p in problems})
        return encode_prompts(problems, names, self.tokenizer, buckets=self.buckets)


def own_layout(
    problems: Sequence[Problem], student: Tokenizer, teacher: Tokenizer, buckets: Sequence[int]
) -> Layout | None:
    """How a teacher reads problems; None if all its prompts are the student's.

    Args:
      problems: all that it will ever read.
      student: lays out the student's prompts.
      teacher: lays out the teacher's.
      buckets: the student's. Where the teacher's longest prompt fits none, it gets one of its own:
        a problem is never left out for what the teacher puts around it.
    """
    if teacher is student:
        return None
    theirs = [prompt_tokens(p, teacher) for p in problems]
    if all(prompt_tokens(p, student) == ids for p, ids in zip(problems, theirs, strict=True)):
        return None
    longest = max(map(len, theirs))
    return Layout(teacher, (*buckets, *([longest] if longest > max(buckets) else [])))


def encode_solutions(
    problems: Sequence[Problem], style: str, tokenizer: Tokenizer, columns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Reference solutions as completions, each ended by a stop token.

    Args:
      problems: B problems.
      style: which of their solutions.
      tokenizer: its first stop id is the one written.
      columns: R, columns of the result.

    Returns:
      `tokens_BR` int32, 0 beyond the length; `length_B` int32, the stop token included; `whole_B`
      bool, ended by a stop token, which here is all of them.

    Raises:
      ValueError: a problem has no such solution, or it does not fit.
    """
    tokens_BR = np.zeros((len(problems), columns), np.int32)
    length_B = np.zeros(len(problems), np.int32)
    for row, problem in enumerate(problems):
        if style not in problem.solutions:
            raise ValueError(
                f"problem {problem.id} of {problem.domain!r} has no solution in style {style!r}; "
                f"it has: {', '.join(problem.solutions) or 'none'}"
            )
        ids = [*tokenizer.encode(problem.solutions[style]), tokenizer.stop_ids[0]]
        if len(ids) > columns:
            raise ValueError(
                f"problem {problem.id} of {problem.domain!r}: its {style} solution has {len(ids)} "
                f"tokens with the stop token, but there are {columns} columns"
            )
        tokens_BR[row, : len(ids)] = ids
        length_B[row] = len(ids)
    return tokens_BR, length_B, np.ones(len(problems), bool)


def _largest_remainder(exact: Mapping[str, float], total: int) -> dict[str, int]:
    """Whole numbers nearest to `exact` that add up to `total`."""
    whole = {key: int(value) for key, value in exact.items()}
    by_remainder = sorted(exact, key=lambda key: whole[key] - exact[key])
    for key in by_remainder[: total - sum(whole.values())]:
        whole[key] += 1
    return whole


def _salt(domain: str) -> int:
    """Keeps equal ids of different domains from drawing the same noise or order."""
    return zlib.crc32(domain.encode())


def _fingerprint(problems: Sequence[Problem]) -> str:
    """Changes with the number, the order and the content of problems."""
    digest = hashlib.sha256()
    for i in range(len(problems)):
        p = problems[i]
        digest.update(json.dumps([p.id, p.level, p.prompt, p.answer]).encode())
    return digest.hexdigest()[:16]
