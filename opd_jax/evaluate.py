"""Held-out evaluation, on the sampler and the verifiers that train.

The same problems are sampled with the same noise at every evaluation of a run, so that differences
between two sets of weights are not differences between two draws.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from opd_jax import ledger, rewards, steps
from opd_jax.algorithms import texts
from opd_jax.config import EvaluationSettings
from opd_jax.core import rng, sharding
from opd_jax.core.types import Params
from opd_jax.data.problem import Problem
from opd_jax.data.prompts import encode_prompts
from opd_jax.data.stopping import cut_rollout
from opd_jax.data.tokenizer import Tokenizer
from opd_jax.models.config import ModelConfig
from opd_jax.rollout import Sampling


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Everything about an evaluation but the weights."""

    config: ModelConfig
    mesh: jax.sharding.Mesh
    tokenizer: Tokenizer
    problems: Mapping[str, Mapping[str, Sequence[Problem]]]  # Split -> domain -> problems.
    settings: EvaluationSettings
    max_new_tokens: int
    buckets: tuple[int, ...]
    seed: int
    verifiers: rewards.Pool = dataclasses.field(default_factory=rewards.Pool)
    stop_strings: tuple[str, ...] = ()  # Texts that end a completion, besides the stop tokens.

    def run(
        self,
        params: Params,
        *,
        step: int,
        split: str,
        greedy: bool = False,
        check: Callable[[str], None] = lambda phase: None,
    ) -> tuple[list[dict[str, Any]], float]:
        """Evaluates one split of every domain.

        Args:
          params: the weights.
          step: updates they have had, for the records.
          split: a key of `problems`.
          greedy: take the likeliest token and one sample, whatever the settings say.
          check: called around every batch; may raise to give up (a signal to stop).

        Returns:
          One record per domain, as evals.jsonl has them (without `flops_total`), and the FLOPs.
        """
        s = self.settings
        sampling = (
            Sampling(1, self.max_new_tokens, temperature=0.0)
            if greedy
            else Sampling(s.samples, self.max_new_tokens, s.temperature, s.top_k, s.top_p)
        )
        records, flops = [], 0.0
        for domain, problems in self.problems[split].items():
            rows = []
            for start in range(0, len(problems), s.batch):
                part = problems[start : start + s.batch]
                found, spent = self._batch(params, part, sampling, check)
                rows.append(found)
                flops += spent
            # Only now: verifiers have been at work while the next batches were sampled.
            correct = [marks.result().right_B.astype(int) for marks, _, _ in rows]
            correct = np.concatenate(correct).reshape(-1, sampling.samples).tolist()
            length, truncated = (np.concatenate([r[i] for r in rows]).tolist() for i in (1, 2))
            records.append(
                {
                    "step": step,
                    "split": split,
                    "domain": domain,
                    "greedy": greedy,
                    "id": [p.id for p in problems],
                    "level": [p.level for p in problems],
                    "correct": correct,
                    "length": length,
                    "truncated": truncated,
                }
            )
        return records, flops

    def _batch(self, params, part: Sequence[Problem], sampling: Sampling, check):
        """Marks on their way, lengths and truncation `[problems, samples]`, and the FLOPs.

        A short batch is filled up with its first problem, so that it does not compile anew, and so
        that every host makes the same number of steps however many problems there are.
        """
        check("evaluation")
        n, real = sampling.samples, len(part)
        full = list(part) + [part[0]] * (self.settings.batch - real)
        names = sorted({p.domain for p in part})
        prompt = encode_prompts(full, names, self.tokenizer, buckets=self.buckets)
        rollout_step = steps.make_rollout_step(self.config, sampling)
        key = rng.stream(self.seed, "evaluate")
        rollout, _ = rollout_step(params, sharding.put(self.mesh, prompt), key)
        check("evaluation, sampling")
        length_B, stopped_B = steps.everywhere((rollout.length_B, rollout.stopped_B))
        length = length_B.reshape(-1, n)[:real]
        prompt_P = prompt.length_P[:real]
        flops = ledger.prefill(self.config, prompt_P)
        flops += ledger.decode(self.config, np.repeat(prompt_P, n), length.reshape(-1))
        if self.stop_strings:
            rollout, text = cut_rollout(self.tokenizer, rollout, self.stop_strings)
            length, stopped_B = rollout.length_B.reshape(-1, n)[:real], rollout.stopped_B
        else:
            text = texts(self.tokenizer, rollout)
        text = text[: real * n]
        truncated = (~stopped_B).astype(int).reshape(-1, n)[:real]
        return (self.verifiers.submit(part, text), length, truncated), flops


def accuracy(records: Sequence[Mapping[str, Any]]) -> float:
    """Mean accuracy over domains, each domain counting once whatever its number of problems."""
    return float(np.mean([np.mean(r["correct"]) for r in records]))
