"""The plan: stages in order, who starts from whom, who teaches whom; resumable at any point.

A stage that has a result.json is skipped, one that has a checkpoint goes on from it. Nothing is
decided by what happens to lie in the workdir: a changed config is refused.
"""

import dataclasses
import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath

from opd_jax import domains, guards, report, rewards, teacher_prompts, train, vocabulary
from opd_jax.algorithms import Context, Teacher
from opd_jax.config import Experiment, Stage
from opd_jax.core import sharding, tree
from opd_jax.data import prompts as prompt_data
from opd_jax.data import templates
from opd_jax.data import tokenizer as tokenizers
from opd_jax.data.problem import SPLITS, Problem
from opd_jax.evaluate import Evaluator
from opd_jax.infra import distributed
from opd_jax.infra.preemption import StopSignal
from opd_jax.infra.writer import require_writable
from opd_jax.models import lora
from opd_jax.models.config import ModelConfig
from opd_jax.teachers import Weights, model_config

# Packages whose version may change a number.
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "grain")
# Sections of a config that change how a run is carried out but not what it computes.
FREE_SECTIONS = ("runtime", "mesh")


def run(experiment: Experiment, workdir: str, devices: Sequence[jax.Device] | None = None) -> str:
    """Runs every stage that is not finished and writes the report.

    Args:
      experiment: the parsed config.
      workdir: a directory for this experiment alone; any path that epath takes.
      devices: what to run on; None: all there are.

    Returns:
      The summary table.

    Raises:
      ValueError: the config is wrong, or is not the one that the workdir was started with.
      train.Stopped: a signal asked for it; the next start goes on.
    """
    directory = epath.Path(workdir)
    require_writable(directory)
    distributed.require_shared(directory)
    distributed.check_same(
        "configuration", identity(experiment), "start every host with the same --config, overrides "
        "and package versions"
    )  # fmt: skip
    mesh = sharding.make_mesh(**dataclasses.asdict(experiment.mesh), devices=devices)
    pool = rewards.Pool(
        experiment.verifiers,
        workers=experiment.runtime.verifier_workers,
        allow_unsandboxed=experiment.runtime.allow_unsandboxed,
    )
    with jax.set_mesh(mesh), StopSignal() as stop, pool:
        guards.check_experiment(experiment, guards.batch_shards(mesh))
        check_plan(experiment, directory)
        runner = _Runner(experiment, directory, mesh, stop, pool)
        runner.check()
        record_plan(experiment, directory)
        record_problems(runner.reports, directory)
        summary = ""
        for name in experiment.plan:
            result = directory / name / "result.json"
            if distributed.from_writer(result.exists, f"result of {name}"):
                logging.info("stage %s is finished: skipped", name)
                continue
            try:
                runner.run(name)
            except (train.Stopped, train.NonFiniteError):
                write_report(directory)
                raise
            # After every stage: a long run can be looked at, also when it is killed later.
            summary = write_report(directory)
    return summary or write_report(directory)


def write_report(directory: epath.Path) -> str:
    """The report on what there is so far, by the one process that writes; its summary."""
    return report.write(directory) if distributed.is_writer() else ""


class _Runner:
    """Prepares the stages of an experiment: models, problems, weights, teachers."""

    def __init__(self, experiment, directory, mesh, stop, pool):
        self.x, self.directory, self.mesh, self.stop = experiment, directory, mesh, stop
        self.pool = pool
        self.tokenizer = load_tokenizer(experiment)
        self.models: dict[str, ModelConfig] = {}
        for name, settings in experiment.models.items():
            model = model_config(settings, self.tokenizer.vocab_size)
            guards.check_model(model, name, self.tokenizer)
            self.models[name] = model.of_tokens(self.tokenizer.vocab_size)
        self.weights = Weights(experiment, directory, mesh, self.models)
        self.problems: dict[tuple[str, str], list[Problem]] = {}
        # By stage and domain, where a teacher reads prompts of its own.
        self.layouts: dict[tuple[str, str], prompt_data.Layout] = {}
        self.reports: dict[str, Any] = {}  # Domain -> what its splits had in common.

    def check(self) -> None:
        """Looks at all stages before the first is trained: weights, lengths, problems."""
        for name in self.x.plan:
            stage, field = self.x.stages[name], f"stages.{name}"
            columns = max(self.x.prompt_buckets) + stage.sampling.max_new_tokens
            guards.check_length(self.models[stage.model], field, columns)
            guards.check_stop_tokens(stage, field, self.tokenizer)
            guards.check_source(stage.init, f"{field}.init", self.tokenizer, teaches=False)
            for domain, spec in stage.teachers.items():
                where = f"{field}.teachers.{domain}"
                guards.check_source(
                    spec,
                    where,
                    self.tokenizer,
                    teaches=True,
                    stop_token_classes=stage.opd.stop_token_classes,
                )
            for domain in stage.domains:
                for split in SPLITS:
                    self.load(domain, split)
            self.lay_out(name)
        self.pool.check([p for problems in self.problems.values() for p in problems])

    def run(self, name: str) -> None:
        """Prepares one stage, checks it on the real weights, and trains it."""
        x, stage = self.x, self.x.stages[name]
        field, config = f"stages.{name}", self.weights.config(name)
        guards.check_length(config, field, self.columns(name))
        quotas = prompt_data.quotas(stage.domains, stage.prompts)
        guards.check_ranges(stage, field, quotas, guards.batch_shards(self.mesh))
        params, base = self.weights.initial(name)
        shared = vocabulary.shared_tokens(stage, self.tokenizer)
        trained = config.of_tokens(shared)
        teachers = self.teachers(name, shared)
        for domain, teacher in teachers.items():
            where = f"{field}.teachers.{domain}"
            guards.check_teacher(teacher, where, trained, self.columns(name, domain))
        context = Context(
            stage=stage,
            seed=x.seed,
            config=trained,
            mesh=self.mesh,
            tokenizer=self.stopping(stage),
            ranges=ranges(quotas),
            teachers=teachers,
            # A copy of what is trained, since the update donates its buffers.
            reference=lora.join(base, tree.copy(params)) if stage.grpo.kl_coefficient else None,
            verifiers=self.pool,
            stop_strings=x.stop_strings,
        )
        problems = {domain: self.load(domain, "train") for domain in quotas}
        if stage.algorithm != "sft":
            self.check_ratio(context, lora.join(base, params), problems, quotas)
        job = train.Job(
            name=name,
            context=context,
            params=params,
            base=base,
            problems=problems,
            quotas=quotas,
            evaluator=self.evaluator(stage, config),
            checkpoint=x.checkpoint,
            buckets=x.prompt_buckets,
            progress_seconds=x.runtime.progress_seconds,
            directory=self.directory / name,
            meta={
                "model": dataclasses.asdict(config),
                "tokenizer": self.tokenizer.fingerprint(),
                "init": stage.init,
                "teachers": {domain: t.manifest for domain, t in teachers.items()},
            },
        )
        train.run(job, self.stop)

    def columns(self, name: str, domain: str = "") -> int:
        """Tokens of the longest row that a stage's student, or a domain's teacher, may see."""
        own = self.layouts[name, domain].buckets if (name, domain) in self.layouts else ()
        room = self.x.stages[name].sampling.max_new_tokens
        return max(own or self.x.prompt_buckets) + room

    def lay_out(self, name: str) -> None:
        """Finds how the teachers of a stage read its problems, and whether they can."""
        stage = self.x.stages[name]
        shared = vocabulary.shared_tokens(stage, self.tokenizer)
        for domain, spec in stage.teachers.items():
            where, problems = f"stages.{name}.teachers.{domain}", self.load(domain, "train")
            reader = teacher_prompts.reader(self.x, stage, domain, self.tokenizer)
            vocabulary.check_reader(where, reader, self.tokenizer, stage.opd.stop_token_classes)
            layout = prompt_data.own_layout(problems, self.tokenizer, reader, self.x.prompt_buckets)
            if layout is None:
                vocabulary.check_readable(problems, self.tokenizer, shared, where)
            else:
                self.layouts[name, domain] = layout
                theirs, ours = (
                    t.encode_prompt(problems[0].prompt) for t in (reader, self.tokenizer)
                )
                logging.info(
                    "%s reads prompts of its own, e.g. %r where the student reads %r",
                    where, "".join(reader.pieces(theirs)), "".join(self.tokenizer.pieces(ours)),
                )  # fmt: skip
            guards.check_window(spec, where, self.columns(name, domain))

    def teachers(self, name: str, shared: int) -> dict[str, Teacher]:
        """A stage's teachers by domain, each with how it reads, all with the same tokens."""
        stage, found = self.x.stages[name], {}
        for domain, teacher in self.weights.teachers(name).items():
            layout, manifest = None, teacher.manifest
            if (name, domain) in self.layouts:
                layout = self.layouts[name, domain]
                chat = teacher_prompts.settings(self.x, stage, domain)
                manifest = manifest | {"chat": dataclasses.asdict(chat)}
            config = teacher.config.of_tokens(shared)
            found[domain] = dataclasses.replace(
                teacher, config=config, layout=layout, manifest=manifest
            )
        return found

    def load(self, domain: str, split: str) -> list[Problem]:
        """The problems of a domain that fit the prompt buckets; those that do not are counted."""
        if domain not in self.reports:
            d = self.x.domains[domain]
            data_dir = str(epath.Path(self.x.runtime.data_dir).expanduser())
            # Built on first use, in a folder that processes may share.
            with distributed.writer_first(f"problems of {domain}"):
                splits, report = domains.load_splits(d, data_dir, self.pool.for_loading())
            self.reports[domain] = report
            for name, problems in splits.items():
                filled = prompt_data.fill_template(problems, d.template)
                self.problems[domain, name] = self.fitting(domain, name, filled)
        return self.problems[domain, split]

    def fitting(self, domain: str, split: str, found: list[Problem]) -> list[Problem]:
        """Those that fit the prompt buckets; the others are counted."""
        kept, dropped = prompt_data.fit_prompts(
            found, self.tokenizer, max(self.x.prompt_buckets), self.x.prompt_overflow
        )
        if dropped:
            logging.warning(
                "domain %s, %s: %d of %d prompts are longer than %d tokens and were dropped",
                domain, split, dropped, len(found), max(self.x.prompt_buckets),
            )  # fmt: skip
        return kept

    def evaluator(self, stage: Stage, config: ModelConfig) -> Evaluator:
        """Held-out problems of the stage's domains; every stage sees the same ones of a domain."""
        s = self.x.evaluation
        wanted = {"validation": s.validation_problems, "test": s.test_problems}
        return Evaluator(
            config=config,
            mesh=self.mesh,
            tokenizer=self.stopping(stage),
            problems={
                split: {d: some(self.load(d, split), count) for d in self.held_out(stage)}
                for split, count in wanted.items()
            },
            settings=s,
            max_new_tokens=stage.sampling.max_new_tokens,
            buckets=self.x.prompt_buckets,
            seed=self.x.seed,
            verifiers=self.pool,
            stop_strings=self.x.stop_strings,
        )

    def stopping(self, stage: Stage) -> tokenizers.Tokenizer:
        """The tokenizer with every stop token that a stage knows."""
        return tokenizers.stopping_at(self.tokenizer, stage.opd.stop_token_classes)

    def held_out(self, stage: Stage) -> Sequence[str]:
        """A stage is measured on the domains that it trains on."""
        return tuple(stage.domains)

    def check_ratio(self, context, params, problems, quotas) -> None:
        """The sampler and the scorer on the real weights, on the stage's first prompts."""
        batch = next(prompt_data.PromptStream(problems, quotas, self.x.seed))
        names = sorted({p.domain for p in batch})
        prompt = prompt_data.encode_prompts(
            batch, names, context.tokenizer, buckets=self.x.prompt_buckets
        )
        distributed.barrier("the check of sampler and scorer")
        worst = guards.check_ratio(context, params, sharding.put(self.mesh, prompt))
        logging.info("sampler and scorer agree within %.2g nats", worst)


def load_tokenizer(experiment: Experiment) -> tokenizers.Tokenizer:
    """The experiment's tokenizer, laying prompts out by its chat template if there is one."""
    tokenizer, chat = tokenizers.load(experiment.tokenizer), experiment.chat
    if not chat.template:
        return tokenizer
    source = templates.read(experiment.tokenizer if chat.template == "own" else chat.template)
    chatting = templates.ChatTokenizer(tokenizer, source, chat)
    if not chatting.extends_history():
        logging.info(
            "the chat template rewrites earlier turns; problems have one turn, so nothing is lost"
        )
    return chatting


def ranges(quotas: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """First and last-plus-one prompt of each domain in a batch, e.g. {a: (0, 24), b: (24, 32)}."""
    ends = np.cumsum(list(quotas.values())).tolist()
    return {d: (end - quotas[d], end) for d, end in zip(quotas, ends, strict=True)}


def some(problems: Sequence[Problem], count: int) -> list[Problem]:
    """`count` problems, or all if there are fewer; always the same ones, of all levels alike."""
    order = np.random.default_rng(0).permutation(len(problems))[:count]
    return [problems[i] for i in sorted(order)]


def check_plan(experiment: Experiment, directory: epath.Path) -> None:
    """Refuses a workdir that was started with another config.

    Raises:
      ValueError: lists every key that differs.
    """
    config = json.loads(json.dumps(dataclasses.asdict(experiment)))
    path = directory / "plan.json"
    saved = distributed.from_writer(
        lambda: json.loads(path.read_text())["config"] if path.exists() else None, str(path)
    )
    if saved is None:
        return
    differing = config_differences(saved, config)
    if differing:
        raise ValueError(
            f"{directory} was started with another config; use a new workdir, or restore:\n  "
            + "\n  ".join(differing)
        )


def record_plan(experiment: Experiment, directory: epath.Path) -> None:
    """Writes plan.json when the experiment begins: what the report and later starts go by."""
    path = directory / "plan.json"
    if path.exists() or not distributed.is_writer():
        return
    config = json.loads(json.dumps(dataclasses.asdict(experiment)))
    plan = {
        "name": experiment.name,
        "seed": experiment.seed,
        "config": config,
        "versions": versions(),
        "stages": [
            {"name": name}
            | {k: config["stages"][name][k] for k in ("algorithm", "init", "domains", "teachers")}
            for name in experiment.plan
        ],
        "routes": config["routes"],
        "baseline": experiment.baseline,
    }
    path.write_text(json.dumps(plan, indent=1))


def record_problems(reports: Mapping[str, Any], directory: epath.Path) -> None:
    """Writes problems.json, for the report: sizes of the splits, and what they had in common."""
    if distributed.is_writer():
        (directory / "problems.json").write_text(json.dumps(reports, indent=1))


def config_differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Every key whose value differs, sections that change no result left out."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [] if old == new else [f"{path}: was {old!r}, is {new!r}"]
    keys = [k for k in sorted({*old, *new}) if path or k not in FREE_SECTIONS]
    old, new = (dict.fromkeys(keys, "(absent)") | side for side in (old, new))
    return [x for k in keys for x in config_differences(old[k], new[k], f"{path}.{k}".lstrip("."))]


def identity(experiment: Experiment) -> str:
    """What all hosts must have alike: the config but for the machine's section, and versions."""
    plain = dataclasses.asdict(experiment)
    del plain["runtime"]
    return json.dumps([plain, versions()])


def versions() -> dict[str, str]:
    """Versions of what may change a number, and of Python."""
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    return found | {"python": platform.python_version(), "backend": jax.default_backend()}
