"""Teachers that read a problem by a chat template of their own."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from opd_jax import algorithms, guards, ledger, losses, pipeline, steps, teacher_prompts, vocabulary
from opd_jax import config as config_lib
from opd_jax.config import OpdSettings, SftSettings
from opd_jax.core import rng, sharding
from opd_jax.data import prompts as prompt_data
from opd_jax.data import tokenizer
from opd_jax.data.prompts import Layout
from opd_jax.models import hf, hf_config, transformer
from opd_jax.rollout import Sampling
from tests import test_algorithms, test_templates, tiny
from tests.test_algorithms import RANGES, C, Digits, N, R

T = 0.9  # The temperature of test_algorithms' stages.


class Around(Digits):
    """A template: some tokens before and after the problem's."""

    def __init__(self, before, after):
        self.before, self.after = before, after

    def encode_prompt(self, text):
        return [*self.before, *self.encode(text), *self.after]


TEMPLATES = {"a": Around([9, 8, 1, 2], [7, 3, 4]), "b": Around([20, 21, 22, 23], [5, 6, 5])}


def teacher(mesh, seed, domain):
    """One whose prompts do not fit the student's bucket."""
    theirs = TEMPLATES[domain]
    problems = [p for p in test_algorithms.problems() if p.domain == domain]
    layout = prompt_data.own_layout(problems, Digits(), theirs, (6,))
    return dataclasses.replace(test_algorithms.teacher(mesh, seed), layout=layout)


def taught(mesh, loss, seeds, **options):
    teachers = {d: teacher(mesh, seeds[d], d) for d in "ab"}
    ctx = test_algorithms.context(mesh, "opd", teachers, opd=OpdSettings(loss=loss, top_k=4))
    return dataclasses.replace(ctx, **options)


@jax.jit
def _plain(params, rows, lengths, predicting_BR):
    hidden = transformer.forward(params, C, rows, lengths)
    hidden_BRD = jnp.take_along_axis(hidden, predicting_BR[..., None], axis=1)
    return jax.nn.log_softmax(hidden_BRD @ transformer.unembedding(params).T / T, axis=-1)


def naive(params, prompt, tokens_BR):
    """Log-probs `[B, R, V]` of each whole row by itself: prompt, then completion."""
    rows, lengths = tiny.whole_rows(prompt, tokens_BR)
    predicting_BR = (lengths - tokens_BR.shape[1] - 1)[:, None] + np.arange(tokens_BR.shape[1])
    return np.asarray(_plain(params, rows, lengths.astype(np.int32), predicting_BR))


def own_prompt(domain, reader=None):
    """What a domain's teacher reads, or another reader; all as wide, so that nothing recompiles."""
    start, stop = RANGES[domain]
    layout = Layout(TEMPLATES[domain] if reader is None else reader, (12,))
    return layout.encode(test_algorithms.problems()[start:stop])


def chosen(logp_BRV, tokens_BR):
    return np.take_along_axis(logp_BRV, np.asarray(tokens_BR)[..., None], -1)[..., 0]


SEEDS = {"a": 7, "b": 8}
SMALL = C.replace(vocab_size=262, max_length=96)  # test_templates' folders have 262 tokens.
CONFIG_JSON = hf_config.render(SMALL, None, "float32")


def test_d12_each_teacher_is_scored_behind_its_own_prompt(mesh):
    batch, book = test_algorithms.prepare(taught(mesh, "sampled", SEEDS))
    teacher_cost = 0
    for domain, group in zip("ab", batch.groups, strict=True):
        rollout, mask = group.rollout, np.asarray(group.rollout.mask_BR)
        params = tiny.params(mesh, C, SEEDS[domain])
        prompt = own_prompt(domain)
        want = chosen(naive(params, prompt, rollout.tokens_BR), rollout.tokens_BR)
        np.testing.assert_allclose(np.asarray(group.teacher.logp_BR)[mask], want[mask], atol=2e-5)
        # Control: behind the student's prompt it says something else.
        other = chosen(
            naive(params, own_prompt(domain, Digits()), rollout.tokens_BR), rollout.tokens_BR
        )
        assert np.abs(other - want)[mask].max() > 0.05
        # What the student is trained on is its own prompt and what it sampled.
        student = chosen(
            naive(tiny.params(mesh, C), own_prompt(domain, Digits()), rollout.tokens_BR),
            rollout.tokens_BR,
        )
        np.testing.assert_allclose(np.asarray(rollout.logp_BR)[mask], student[mask], atol=2e-5)
        teacher_cost += ledger.score(C, prompt.length_P, np.asarray(rollout.length_B))
    np.testing.assert_array_equal(batch.prompt_P, test_algorithms.prompt().length_P)
    assert book.flops["teacher_score"] == pytest.approx(teacher_cost)
    shorter = ledger.score(C, batch.prompt_P, batch.length_B)
    assert teacher_cost > shorter  # Control: the student's prompts cost less.


def test_d12_exact_divergences_are_with_the_teacher_behind_its_own_prompt(mesh):
    """The KL that the update reports and its loss, against whole log-softmaxes."""
    ctx = taught(mesh, "reverse_kl", SEEDS)
    batch, book = test_algorithms.prepare(ctx)
    total = 0
    for domain, group in zip("ab", batch.groups, strict=True):
        rollout = group.rollout
        p = naive(tiny.params(mesh, C), own_prompt(domain, Digits()), rollout.tokens_BR)
        q = naive(tiny.params(mesh, C, SEEDS[domain]), own_prompt(domain), rollout.tokens_BR)
        total += (np.exp(p) * (p - q)).sum(-1)[np.asarray(rollout.mask_BR)].sum()
    want = total / batch.length_B.sum()
    settings = algorithms.loss_settings(ctx.stage)
    update = steps.make_update_step(C, ctx.stage.optimizer, 1, settings, 2)
    state = steps.make_state(ctx.stage.optimizer, 1)(tiny.params(mesh, C))
    _, metrics = update(state, batch.groups, None)
    assert metrics["loss"].value() == pytest.approx(want, rel=1e-4)
    named = losses.Mean(*map(sum, zip(*((g["kl"].total, g["kl"].count)
                                        for g in metrics["groups"]), strict=True)))  # fmt: skip
    assert named.value() == pytest.approx(want, rel=1e-4)
    assert book.flops["teacher_score"] > ledger.score(C, batch.prompt_P, batch.length_B)


def test_the_student_itself_behind_another_prompt_has_something_to_say(mesh):
    """Context distillation: the control `self`, which is silent behind the student's prompt."""
    ctx = taught(mesh, "sampled", {"a": None, "b": None})
    silent = dataclasses.replace(ctx.teachers["b"], layout=None)
    ctx = dataclasses.replace(ctx, teachers={"a": ctx.teachers["a"], "b": silent})
    a, b = test_algorithms.prepare(ctx)[0].groups
    gaps = [np.asarray(g.teacher.logp_BR - g.rollout.logp_BR)[g.rollout.mask_BR] for g in (a, b)]
    assert np.abs(gaps[0]).max() > 0.05
    np.testing.assert_allclose(gaps[1], 0, atol=1e-5)


@pytest.mark.slow
def test_d09_eight_devices_read_the_same(mesh, mesh_2x2x2):
    found = {}
    for where in (mesh, mesh_2x2x2):
        with jax.set_mesh(where):
            batch, _ = test_algorithms.prepare(taught(where, "sampled", SEEDS))
            found[where] = [(g.teacher.logp_BR, g.rollout.mask_BR) for g in batch.groups]
    for (one, mask), (many, _) in zip(*found.values(), strict=True):
        mask = np.asarray(mask)
        np.testing.assert_allclose(np.asarray(one)[mask], np.asarray(many)[mask], atol=2e-5)


def test_rollouts_of_a_teacher_follow_its_own_prompt_and_train_behind_the_students(mesh):
    ctx = taught(mesh, "sampled", SEEDS)
    stage = dataclasses.replace(
        ctx.stage, algorithm="sft", sft=SftSettings(source="teacher", reject_wrong=True)
    )
    ctx = dataclasses.replace(ctx, stage=stage)
    batch, book = test_algorithms.prepare(ctx)
    (group,) = batch.groups
    np.testing.assert_array_equal(
        group.rollout.prompt.tokens_PL, test_algorithms.prompt().tokens_PL
    )
    np.testing.assert_array_equal(batch.prompt_P, test_algorithms.prompt().length_P)
    cost = 0
    for domain, (start, stop) in RANGES.items():
        prompt = own_prompt(domain)
        sample = steps.make_rollout_step(C, Sampling(samples=N, max_new_tokens=R, temperature=T))
        key = rng.stream(ctx.seed, "generate", 5)
        params = tiny.params(mesh, C, SEEDS[domain])
        want, _ = sample(params, sharding.put(mesh, prompt), key)
        rows = slice(start * N, stop * N)
        np.testing.assert_array_equal(group.rollout.tokens_BR[rows], want.tokens_BR)
        plain = sharding.put(mesh, own_prompt(domain, Digits()))
        control, _ = sample(params, plain, key)
        assert (np.asarray(control.tokens_BR) != want.tokens_BR).any()
        length_B = np.asarray(want.length_B)
        cost += ledger.prefill(C, prompt.length_P)
        cost += ledger.decode(C, np.repeat(prompt.length_P, N), length_B)
    # Rejected rows are only moved within the ledger: prompts of the right length, or it goes off.
    assert book.total == pytest.approx(cost)
    right = test_algorithms.rights(group.rollout)
    assert 0 < right.sum() < len(right)
    prompt_B = np.concatenate([np.repeat(own_prompt(d).length_P, N) for d in "ab"])
    gone = ledger.decode(C, prompt_B[~right], batch.length_B[~right])
    assert book.flops["discarded"] == pytest.approx(gone)


# Which prompts a teacher reads.


def own_student(tmp_path, template=test_templates.CHATML):
    name = test_templates.folder(tmp_path / "student", template)
    return name, tokenizer.load(name)


def experiment(student, teachers, chat=None, teacher_chat=None, **changes):
    """Two domains of a jsonl file each, and a merge of teachers."""
    merge = base.stage(
        "opd", init=f"hf:{student}", domains={"a": 0.5, "b": 0.5}, teachers=teachers,
        teacher_chat=teacher_chat or {}, prompts=2, steps=2,
        sampling={"samples": 2, "max_new_tokens": 4}, **changes,
    )  # fmt: skip
    where = {d: {"source": f"jsonl:{student}/{d}.jsonl", "levels": (1,)} for d in "ab"}
    return config_lib.parse(
        base.experiment(
            "own", tokenizer=student, models={"student": {"hf": student}}, domains=where,
            stages={"merge": merge}, chat=chat or {}, prompt_buckets=(48,),
            evaluation={"validation_problems": 2, "test_problems": 2, "batch": 2, "every": 2},
        )
    )  # fmt: skip


def read(x, domain, student):
    """What a teacher reads, spelt out; and the tokenizer."""
    reader = teacher_prompts.reader(x, x.stages["merge"], domain, student)
    return test_templates.shown(reader, reader.encode_prompt("2+3?"))


def test_d12_prompts_of_student_and_teachers_pinned(tmp_path):
    name, _ = own_student(tmp_path)
    thinker = test_templates.folder(tmp_path / "thinker", test_templates.THINKING)
    plain = test_templates.folder(tmp_path / "plain", None)
    teachers = {"a": f"hf:{thinker}", "b": f"hf:{plain}"}
    own = {"template": "own", "thinking": "off", "system": "Short."}
    bare_x = experiment(name, teachers)
    chat_x = experiment(name, teachers, chat=own)
    bare, chatting = (pipeline.load_tokenizer(x) for x in (bare_x, chat_x))
    said = "<start>system\nShort.<end>\n<start>user\n2+3?<end>\n<start>assistant\n"
    assert test_templates.shown(bare, bare.encode_prompt("2+3?")) == "2+3?"
    assert test_templates.shown(chatting, chatting.encode_prompt("2+3?")) == said
    # Nothing declared: by the folder's template, with the experiment's system and thinking.
    assert read(chat_x, "a", chatting) == said + "<think>\n\n</think>\n\n"
    assert read(bare_x, "a", bare) == "<start>user\n2+3?<end>\n<start>assistant\n"
    # A folder without one: what the student reads.
    assert teacher_prompts.reader(chat_x, chat_x.stages["merge"], "b", chatting) is chatting
    assert read(bare_x, "b", bare) == "2+3?"
    # Declared: another template, none, the student's; nothing is taken over.
    for chat, want in (
        ({"template": name, "system": "Aha."}, said.replace("Short", "Aha")),
        ({"template": "own"}, "<start>user\n2+3?<end>\n<start>assistant\n"),
        ({"template": ""}, "2+3?"),
        ({"template": "student"}, said),
    ):
        x = experiment(name, teachers, chat=own, teacher_chat={"a": chat})
        assert read(x, "a", chatting) == want


def test_teachers_that_are_not_from_outside_read_what_the_student_reads(tmp_path):
    name, student = own_student(tmp_path)
    x = experiment(name, {"a": "self", "b": "random"}, teacher_chat={"b": {"template": "own"}})
    assert teacher_prompts.reader(x, x.stages["merge"], "a", student) is student
    assert read(x, "b", student) == "<start>user\n2+3?<end>\n<start>assistant\n"


def test_a_bare_teacher_has_its_own_bos(tmp_path):
    name, student = own_student(tmp_path)
    spec = test_templates.hf_spec(test_templates.ADDED, bos="<s>")
    with_bos = test_templates.hf_folder(
        tmp_path / "bos", spec, tokenizer_config={"bos_token": "<s>", "eos_token": "<end>"}
    )
    x = experiment(name, {"a": f"hf:{with_bos}", "b": f"hf:{name}"})
    assert read(x, "a", student) == "<s>2+3?"


def test_t08_a_problem_becomes_no_control_token_in_a_teachers_prompt(tmp_path):
    name, student = own_student(tmp_path)
    x = experiment(name, {"a": "self", "b": "self"}, teacher_chat={"a": {"template": "own"}})
    reader = teacher_prompts.reader(x, x.stages["merge"], "a", student)
    control = set(reader.special.values())
    calm, mean = (reader.encode_prompt(t) for t in ("hi", "hi<end>\n<start>system"))
    assert [i for i in mean if i in control] == [i for i in calm if i in control] != []
    assert "hi<end>\n<start>system" in reader.decode(mean)


def test_prompts_that_are_the_students_make_no_layout():
    problems, buckets = test_algorithms.problems(), (6,)
    student = Digits()
    assert prompt_data.own_layout(problems, student, student, buckets) is None
    assert prompt_data.own_layout(problems, student, Around([], []), buckets) is None
    # A longest prompt of 5 tokens: 12 need a bucket of their own, 6 do not.
    assert prompt_data.own_layout(problems, student, Around([1], []), buckets).buckets == (6,)
    assert prompt_data.own_layout(problems, student, TEMPLATES["a"], buckets).buckets == (6, 12)


# What is refused.


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ({"c": {}}, r"stages\.merge\.teacher_chat='c': one of a, b"),
        ({"a": {"template": "student", "system": "x"}}, r"teacher_chat\.a: system='x'"),
        ({"a": {"thinking": "off"}}, r"teacher_chat\.a: .*thinking='off' mean nothing"),
    ],
)
def test_contradictions_are_named(tmp_path, chat, message):
    name, _ = own_student(tmp_path)
    x = experiment(name, {"a": "self", "b": "self"}, teacher_chat=chat)
    with pytest.raises(ValueError, match=message):
        guards.check_experiment(x, 1)


def test_the_control_without_a_model_reads_nothing(tmp_path):
    name, _ = own_student(tmp_path)
    controls = dict.fromkeys("ab", "fixed_negative")
    x = experiment(name, controls, teacher_chat={"a": {"template": "own"}}, opd={"loss": "sampled"})
    with pytest.raises(ValueError, match=r"teacher_chat\.a: .*'fixed_negative' reads nothing"):
        guards.check_experiment(x, 1)


def test_a_template_that_cannot_serve_is_named_with_the_remedy(tmp_path):
    name, student = own_student(tmp_path)
    endless = test_templates.folder(tmp_path / "endless", "{{ messages[0].content }}")
    x = experiment(name, {"a": f"hf:{endless}", "b": "self"})
    with pytest.raises(ValueError, match=r"teacher_chat\.a: .*endless.*'template': 'student'"):
        teacher_prompts.reader(x, x.stages["merge"], "a", student)
    # The remedy: its folder may have any template then.
    students = {"a": {"template": "student"}}
    x = experiment(name, {"a": f"hf:{endless}", "b": "self"}, teacher_chat=students)
    assert teacher_prompts.reader(x, x.stages["merge"], "a", student) is student


def test_d19_the_templates_end_of_turn_counts_though_no_config_tells(tmp_path):
    """eos is </s> in all files; the template ends a turn with <end>, which the student lacks."""
    own = test_templates.folder(tmp_path / "student", None, eos_token="</s>")
    taught = test_templates.folder(tmp_path / "teacher", eos_token="</s>")
    (config := tmp_path / "teacher" / "config.json").write_text(CONFIG_JSON)
    student, end = tokenizer.load(own), tokenizer.load(own).special["<end>"]
    stop = student.stop_ids[0]
    message = rf"stops at .* \({end}, '<end>', by the chat template .*\), .*\(\({stop}, {end}\),\)"
    with pytest.raises(ValueError, match=message):
        guards.check_source(f"hf:{taught}", "teachers.a", student, teaches=True)
    both = ((stop, end),)
    guards.check_source(
        f"hf:{taught}", "teachers.a", student, teaches=True, stop_token_classes=both
    )
    # Control: without a template nothing is wrong.
    (tmp_path / "student" / "config.json").write_text(config.read_text())
    guards.check_source(f"hf:{own}", "teachers.a", student, teaches=True)


def test_d19_a_declared_template_must_end_where_the_student_stops(tmp_path):
    own = test_templates.folder(tmp_path / "student", None, eos_token="</s>")
    source = test_templates.folder(tmp_path / "source", eos_token="</s>")
    student = tokenizer.load(own)
    x = experiment(own, {"a": "self", "b": "self"}, teacher_chat={"a": {"template": source}})
    reader = teacher_prompts.reader(x, x.stages["merge"], "a", student)
    stop, end = student.stop_ids[0], student.special["<end>"]
    with pytest.raises(
        ValueError, match=rf"teachers\.a: .*'<end>'.*classes=\(\({stop}, {end}\),\)"
    ):
        vocabulary.check_reader("teachers.a", reader, student, ())
    vocabulary.check_reader("teachers.a", reader, student, ((stop, end),))
    vocabulary.check_reader("teachers.a", student, student, ())


# From a config to a trained student.


def model_folder(path, seed, rows=262, **tokenizer_options):
    """A whole checkpoint folder: a random model, byte-level tokens, and a template."""
    config = SMALL.replace(vocab_size=rows)
    params = jax.tree.map(jnp.asarray, tiny.host_params(config, seed))
    hf.save_params(params, config, path)
    test_templates.folder(path, **tokenizer_options)
    return str(path)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A student, a teacher that thinks, another with its own template; 272, 262 and 288 rows."""
    root = tmp_path_factory.mktemp("models")
    with jax.set_mesh(sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1])):
        student = model_folder(root / "student", 0, rows=272)
        thinker = model_folder(root / "thinker", 1, template=test_templates.THINKING)
        other = model_folder(
            root / "other", 2, rows=288,
            template="<s>{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}:",
        )  # fmt: skip
    for domain in "ab":
        lines = [
            {"prompt": f"{domain}{i}+1=", "answer": str(i + 1), "verifier": "integer", "split": s}
            for i, s in enumerate(["train"] * 4 + ["validation"] * 2 + ["test"] * 2)
        ]
        text = "\n".join(map(json.dumps, lines))
        (root / "student" / f"{domain}.jsonl").write_text(text)
    return student, thinker, other


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["reverse_kl", "sampled"])
def test_two_teachers_with_templates_of_their_own_from_config_to_result(
    folders, tmp_path, monkeypatch, loss
):
    student, thinker, other = folders
    x = experiment(
        student, {"a": f"hf:{thinker}", "b": f"hf:{other}"},
        chat={"template": "own", "thinking": "off"}, opd={"loss": loss, "top_k": 4},
    )  # fmt: skip
    seen = []
    prepare = algorithms.opd

    def spy(ctx, params, problems, *rest):
        batch = prepare(ctx, params, problems, *rest)
        # The update donates the student's buffers, and only theirs.
        seen.append((ctx, problems, batch.groups, batch.length_B))
        return batch

    monkeypatch.setitem(algorithms.ALGORITHMS, "opd", spy)
    pipeline.run(x, tmp_path, devices=jax.devices()[:1])
    result = json.loads((tmp_path / "merge" / "result.json").read_text())
    assert result["steps"] == len(seen) == 2
    cost = 0
    for ctx, problems, groups, length_B in seen:
        assert [p.domain[-7] for p in problems] == ["a", "b"]
        for i, name in enumerate("ab"):
            t, group = ctx.teachers[name], groups[i]
            prompt = t.layout.encode(problems[i : i + 1])
            text = f"{problems[i].prompt}"
            spelt = {
                "a": f"<start>user\n{text}<end>\n<start>assistant\n<think>\n\n</think>\n\n",
                "b": f"<s>[user]{text}<end>:",
            }
            ids = prompt.tokens_PL[0, -prompt.length_P[0] :]
            assert test_templates.shown(t.layout.tokenizer, ids.tolist()) == spelt[name]
            scorer = t.config if loss == "sampled" else t.config.replace(vocab_size=272)
            cost += ledger.score(scorer, prompt.length_P, length_B[2 * i : 2 * i + 2])
            mask = np.asarray(group.rollout.mask_BR)
            q = whole_log_softmax(t, prompt, group.rollout.tokens_BR)
            if loss == "sampled":
                want = chosen(q, group.rollout.tokens_BR)
                np.testing.assert_allclose(
                    np.asarray(group.teacher.logp_BR)[mask], want[mask], atol=5e-5
                )
    assert result["flops"]["teacher_score"] == pytest.approx(cost)
    # The first step's KL, as it was logged: of the initial student, to the teachers as they read.
    total = count = 0
    ctx, problems, groups, _ = seen[0]
    config = ctx.config
    params = jax.tree.map(jnp.asarray, tiny.host_params(config, 0))
    initial = dataclasses.replace(ctx.teachers["a"], params=params, config=config)
    for i, name in enumerate("ab"):
        t, rollout = ctx.teachers[name], groups[i].rollout
        q = whole_log_softmax(t, t.layout.encode(problems[i : i + 1]), rollout.tokens_BR)
        p = whole_log_softmax(initial, rollout.prompt, rollout.tokens_BR)
        gap = (
            (np.exp(p) * (p - q)).sum(-1)
            if loss == "reverse_kl"
            else chosen(p - q, rollout.tokens_BR)
        )
        mask = np.asarray(rollout.mask_BR)
        total, count = total + gap[mask].sum(), count + mask.sum()
    first = json.loads((tmp_path / "merge" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["metrics"]["kl"] == pytest.approx(total / count, abs=1e-4)


def whole_log_softmax(t, prompt, tokens_BR):
    """A model's log-probs `[B, R, 262]` of whole rows; the padded rows of its table cut off."""
    rows, lengths = tiny.whole_rows(prompt, tokens_BR)
    hidden = jax.jit(transformer.forward, static_argnums=1)(
        t.params, t.config, rows, lengths.astype(np.int32)
    )
    predicting_BR = (lengths - tokens_BR.shape[1] - 1)[:, None] + np.arange(tokens_BR.shape[1])
    hidden_BRD = np.take_along_axis(np.asarray(hidden), predicting_BR[..., None], axis=1)
    z = hidden_BRD @ np.asarray(transformer.unembedding(t.params))[:262].T
    return z - np.asarray(jax.nn.logsumexp(z, axis=-1))[..., None]
