"""One stage: a training run from its initial weights to a result, resumable at any update.

Read `StageRun.run` first. The loop dispatches update t and then looks at the metrics of update t-1,
so the host does not wait for the device where it need not. Everything random is a function of
(seed, step), so a resumed stage repeats nothing and skips nothing.
"""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath

from opd_jax import ledger, steps
from opd_jax.algorithms import ALGORITHMS, Batch, Context, loss_settings
from opd_jax.config import CheckpointSettings, StopRule
from opd_jax.core import tree
from opd_jax.core.types import Mean, Params, TrainState
from opd_jax.data.problem import Problem
from opd_jax.data.prompts import PromptStream, encode_prompts
from opd_jax.evaluate import Evaluator, accuracy
from opd_jax.infra import distributed
from opd_jax.infra.checkpoint import Checkpointer
from opd_jax.infra.preemption import StopSignal
from opd_jax.infra.writer import Progress, RunWriter
from opd_jax.models import lora
from opd_jax.optim import budget


class Stopped(Exception):
    """The run was asked to stop; what was done is saved, and the next start goes on from there."""


class NonFiniteError(Exception):
    """A gradient is NaN or infinite. The last good checkpoint is kept."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A stage, with everything that the pipeline has prepared for it."""

    name: str
    context: Context
    params: Params  # Initial weights: what is trained.
    base: Params | None  # What they are deltas of, if they are (models/lora.py); never changed.
    problems: Mapping[str, Sequence[Problem]]  # Domain -> training problems.
    quotas: Mapping[str, int]  # Domain -> prompts per batch.
    evaluator: Evaluator
    checkpoint: CheckpointSettings
    buckets: tuple[int, ...]
    progress_seconds: float
    directory: epath.Path
    meta: Mapping[str, Any]  # Model, init and teacher manifest: saved with each checkpoint.


@dataclasses.dataclass
class Journal:
    """What a stage knows of itself besides its weights; saved in every checkpoint."""

    step: int = 0  # Rollouts done; each makes `updates_per_rollout` updates.
    tokens: int = 0  # Completion tokens trained on.
    seconds: float = 0.0
    history: list[list[float]] = dataclasses.field(default_factory=list)  # [step, accuracy].
    stopped_by: str = ""  # "budget" | "plateau" | "target", once the stage has ended.


@dataclasses.dataclass(frozen=True)
class Pending:
    """A dispatched update whose metrics are still on the device."""

    step: int
    batch: Batch
    metrics: dict[str, Any]
    flops: dict[str, float]
    flops_total: float
    tokens: int
    seconds: float


class StageRun:
    """A stage while it runs: device state, host state, and the files it writes."""

    def __init__(self, job: Job, stop: StopSignal, writer: RunWriter, checkpointer: Checkpointer):
        """Starts afresh, or goes on from the newest checkpoint that can be read."""
        self.job, self.stop, self.writer, self.checkpointer = job, stop, writer, checkpointer
        self.stage, ctx = job.context.stage, job.context
        self.ctx = dataclasses.replace(ctx, check=self.give_up_if_asked)
        self.book = ledger.Ledger()
        self.stream = PromptStream(job.problems, job.quotas, ctx.seed)
        self.journal = Journal()
        self.pending: Pending | None = None
        self.warned = False
        updates = budget(self.stage.optimizer, self.stage.steps * self.stage.updates_per_rollout)
        self.update_step = steps.make_update_step(
            ctx.config, self.stage.optimizer, updates, loss_settings(self.stage),
            self.stage.micro_batches,
        )  # fmt: skip
        self.state: TrainState = steps.make_state(self.stage.optimizer, updates)(job.params)
        self._resume()
        distributed.check_same(
            f"prompt stream of stage {job.name}", json.dumps(self.stream.state()),
            "give every host the same problem files and package versions",
        )  # fmt: skip
        writer.truncate(self.journal.step)
        self.mark = self._mark()
        self.started = time.monotonic() - self.journal.seconds
        self.progress = Progress(job.name, self.stage.steps, every_seconds=job.progress_seconds)

    def run(self) -> dict[str, Any]:
        """Trains to the end of the budget or to the plateau; returns the stage's result record.

        Raises:
          Stopped: a signal asked for it; the last finished update is saved.
          NonFiniteError: names the step and the leaves.
        """
        try:
            while not self.journal.stopped_by:
                self.give_up_if_asked("start")
                if self._evaluation_is_due():
                    self.evaluate()
                else:
                    self.update()
                    if self._checkpoint_is_due():
                        self.flush()
                        self.save()
            self.checkpointer.wait()
            return self.finish()
        except Stopped:
            self._restore_mark()
            self.flush()
            self.save()
            self.checkpointer.wait()
            logging.warning("stage %s: stopped, saved at step %d", self.job.name, self.journal.step)
            raise
        finally:
            self.progress.close()

    def update(self) -> None:
        """One rollout and what is learnt from it; then the metrics of the one before."""
        ctx, journal, config = self.ctx, self.journal, self.ctx.config
        problems = next(self.stream)
        names = sorted({p.domain for p in problems})
        prompt = encode_prompts(problems, names, ctx.tokenizer, buckets=self.job.buckets)
        prepare = ALGORITHMS[self.stage.algorithm]
        batch = prepare(ctx, self.policy(), problems, prompt, journal.step, self.book)
        for _ in range(self.stage.updates_per_rollout):
            self.state, metrics = self.update_step(self.state, batch.groups, self.job.base)
            self.book.add("update", ledger.update(config, batch.prompt_P, batch.length_B))
            self.book.add("remat", ledger.remat(config, batch.prompt_P, batch.length_B))
        journal.step += 1
        journal.tokens += int(batch.length_B.sum())
        self.flush()
        self.pending = Pending(
            journal.step, dataclasses.replace(batch, groups=[]), metrics, self.book.state(),
            self.book.total, journal.tokens, time.monotonic() - self.started,
        )  # fmt: skip
        self.mark = self._mark()

    def evaluate(self) -> None:
        """Measures all splits, applies the stop rule, and saves with the validation accuracy."""
        self.flush()
        journal, found, spent = self.journal, [], 0.0
        for split in self.job.evaluator.problems:
            records, flops = self.job.evaluator.run(
                self.policy(), step=journal.step, split=split, check=self.give_up_if_asked
            )
            found += [r | {"flops_total": self.book.total} for r in records]
            spent += flops
        # Nothing is booked or written before all is measured: giving up half-way leaves no trace.
        self.book.add("evaluation", spent)
        self.writer.evaluation(found)
        measured = accuracy([r for r in found if r["split"] == "validation"])
        journal.history.append([journal.step, measured])
        if 0 < self.stage.stop.target <= measured:
            journal.stopped_by = "target"
        elif plateaued(journal.history, self.stage.stop):
            journal.stopped_by = "plateau"
        elif journal.step == self.stage.steps:
            journal.stopped_by = "budget"
        self.mark = self._mark()
        self.save(measured)

    def finish(self) -> dict[str, Any]:
        """Chooses the weights to hand on, measures them greedily, writes the result."""
        journal, selected = self.journal, self.journal.step
        if self.stage.stop.select == "best":
            selected = int(max(journal.history, key=lambda point: (point[1], -point[0]))[0])
        params = self.policy()
        if selected != journal.step:
            restored = self.checkpointer.restore(abstract(self.state), selected)
            params = lora.join(self.job.base, restored.state.params)
        records, flops = self.job.evaluator.run(
            params, step=selected, split="test", greedy=True, check=self.give_up_if_asked
        )
        self.writer.evaluation([r | {"flops_total": self.book.total} for r in records])
        self.book.add("evaluation", flops)
        result = {
            "name": self.job.name,
            "algorithm": self.stage.algorithm,
            "steps": journal.step,
            "selected_step": selected,
            "flops": self.book.state(),
            "flops_total": self.book.total,
            "stopped_by": journal.stopped_by,
            "seconds": time.monotonic() - self.started,
        }
        if distributed.is_writer():
            (self.job.directory / "result.json").write_text(json.dumps(result, indent=1))
        return result

    def policy(self) -> Params:
        """The student's whole weights."""
        return lora.join(self.job.base, self.state.params)

    def save(self, metric: float | None = None) -> None:
        """Saves weights, optimizer, prompt stream, ledger and journal, in the background."""
        self.journal.seconds = time.monotonic() - self.started
        meta = dict(self.job.meta) | {
            "journal": dataclasses.asdict(self.journal),
            "stream": self.stream.state(),
            "ledger": self.book.state(),
        }
        self.checkpointer.save(self.journal.step, self.state, meta, metric=metric)

    def flush(self) -> None:
        """Writes the metrics of the last dispatched update, waiting for it if need be."""
        if self.pending is None:
            return
        p, self.pending = self.pending, None
        finite = np.asarray(p.metrics["finite"])
        if not finite.all():
            names = tree.leaves_by_path(self.state.params)
            leaves = [name for name, ok in zip(names, finite, strict=True) if not ok]
            raise NonFiniteError(
                f"stage {self.job.name}, step {p.step}: the gradient of {', '.join(leaves)} is NaN "
                f"or infinite; the last good checkpoint is step {self.checkpointer.latest()} in "
                f"{self.job.directory}. Lower optimizer.learning_rate, or set optimizer.clip_norm"
            )
        metrics = named_metrics(p.metrics, p.batch)
        self._warn_of_loops(p.step, metrics)
        self.writer.step(
            {
                "step": p.step,
                "seconds": p.seconds,
                "flops": p.flops,
                "flops_total": p.flops_total,
                "metrics": metrics,
            }
        )
        watched = {"sft": ("loss",), "grpo": ("reward",), "opd": ("kl", "reward")}
        shown = {k: metrics[k] for k in watched[self.stage.algorithm] if k in metrics}
        failed = {k: metrics[k] for k in ("verifier_timeouts", "verifier_errors") if k in metrics}
        self.progress.show(
            p.step,
            values=shown | {k: count for k, count in failed.items() if count},
            tokens=p.tokens,
            flops=p.flops_total,
            accuracy=self.journal.history[-1][1],
        )

    def _warn_of_loops(self, step: int, metrics: Mapping[str, float]) -> None:
        """Once a stage: completions that nearly all hit the limit have lost their way to an end."""
        if self.warned or metrics["truncated"] <= self.stage.warn_truncated:
            return
        self.warned = True
        logging.warning(
            "stage %s, step %d: %.0f%% of completions hit sampling.max_new_tokens=%d, and %.0f%% "
            "of their n-grams are repeated. Raise the limit, see whether student and teacher end "
            "their turns alike (opd.stop_token_classes), or lower optimizer.learning_rate",
            self.job.name, step, 100 * metrics["truncated"], self.stage.sampling.max_new_tokens,
            100 * metrics["repeated"],
        )  # fmt: skip

    def give_up_if_asked(self, phase: str) -> None:
        """Raises Stopped if any process was asked to stop; all must call it at the same phase."""
        if self.stop.agreed(self.journal.step, f"{self.job.name}, {phase}"):
            raise Stopped

    def _evaluation_is_due(self) -> bool:
        step, history = self.journal.step, self.journal.history
        regular = step % self.job.evaluator.settings.every == 0 or step == self.stage.steps
        return regular and not (history and history[-1][0] == step)

    def _checkpoint_is_due(self) -> bool:
        s = self.job.checkpoint
        wanted = self.journal.step % s.every == 0 or self.journal.step in s.keep_steps
        return wanted and not self._evaluation_is_due()

    def _mark(self) -> tuple[dict, dict]:
        return self.stream.state(), self.book.state()

    def _restore_mark(self) -> None:
        """Forgets the prompts and FLOPs of a step that was given up before its update."""
        self.stream.restore(self.mark[0])
        self.book.restore(self.mark[1])

    def _resume(self) -> None:
        restored = self.checkpointer.restore(abstract(self.state))
        if restored is None:
            return
        for key, mine in self.job.meta.items():
            saved = restored.meta[key]
            if saved != json.loads(json.dumps(mine)):
                raise ValueError(
                    f"stage {self.job.name}: its checkpoint was made with another {key}:\n  saved "
                    f"{saved}\n  now   {mine}\nrestore what it was made with, or use a new workdir"
                )
        self.state = restored.state
        self.journal = Journal(**restored.meta["journal"])
        self.stream.restore(restored.meta["stream"])
        self.book.restore(restored.meta["ledger"])
        logging.info("stage %s: goes on from step %d", self.job.name, self.journal.step)


def run(job: Job, stop: StopSignal) -> dict[str, Any]:
    """Trains a stage to its end; see `StageRun.run`."""
    with (
        RunWriter(job.directory) as writer,
        Checkpointer(
            job.directory / "checkpoints",
            keep_newest=job.checkpoint.keep_newest,
            keep_steps=job.checkpoint.keep_steps,
        ) as checkpointer,
    ):
        return StageRun(job, stop, writer, checkpointer).run()


def plateaued(history: Sequence[Sequence[float]], rule: StopRule) -> bool:
    """Whether the last `patience` evaluations brought no new best, by `min_delta`.

    Example: patience 2, min_delta 0.01, accuracies 0.30, 0.40, 0.405, 0.39 -> True.
    """
    best, since = -np.inf, 0
    for _, value in history:
        if value > best + rule.min_delta:
            best, since = value, 0
        else:
            since += 1
    return rule.patience > 0 and since >= rule.patience


def named_metrics(metrics: Mapping[str, Any], batch: Batch) -> dict[str, float]:
    """Device metrics and host facts of a step as numbers by name.

    A metric of one teacher's rows stands under "metric/teacher"; without a suffix it is the mean
    over all rows.
    """
    out = dict(batch.facts)
    for name in ("loss", "grad_norm", "update_norm", "param_norm"):
        out[name] = metrics[name].value()
    groups: list[dict[str, Mean]] = jax.device_get(metrics["groups"])
    whole: dict[str, Mean] = {}
    for name, group in zip(batch.names, groups, strict=True):
        for metric, mean in group.items():
            whole[metric] = whole[metric] + mean if metric in whole else mean
            if name:
                out[f"{metric}/{name}"] = mean.value()
    return out | {metric: mean.value() for metric, mean in whole.items()}


def abstract(state: TrainState) -> TrainState:
    """Shapes, dtypes and layouts of a state."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
