"""Start-up guards: each error provoked once, naming the field, the value and the remedy."""

import dataclasses
import json
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tokenizers as hf_tokenizers

from configs import smoke
from opd_jax import config, guards, steps
from opd_jax.algorithms import Context, Teacher
from opd_jax.config import EvaluationSettings, LoraSettings, Stage
from opd_jax.data import tokenizer
from opd_jax.infra import checkpoint
from opd_jax.models import hf_config
from opd_jax.rollout import Sampling
from tests import tiny

SMOKE = config.parse(smoke.get_config())
A, P = "arithmetic", "program"
SMALL = tiny.CONFIG.replace(num_layers=1)


def with_stage(name="merge", x=SMOKE, **changes):
    """The smoke experiment with some fields of one stage changed."""
    return dataclasses.replace(
        x, stages=x.stages | {name: dataclasses.replace(x.stages[name], **changes)}
    )


def part(name, section, **changes):
    """A section of a smoke stage with some fields changed."""
    return dataclasses.replace(getattr(SMOKE.stages[name], section), **changes)


def refuses(x, *needles, shards=1):
    with pytest.raises(ValueError, match=re.escape(needles[0])) as caught:
        guards.check_experiment(x, shards)
    for needle in needles:
        assert needle in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_smoke_config_passes():
    guards.check_experiment(SMOKE, 1)
    guards.check_experiment(SMOKE, 4)


# What the plan says.


def test_an_empty_plan_and_unknown_or_repeated_stages_are_refused():
    refuses(dataclasses.replace(SMOKE, plan=()), "plan is empty", "name the stages")
    plan = ("base", "expert_a", "exprt_p")
    refuses(dataclasses.replace(SMOKE, plan=plan), "plan[2]='exprt_p'", "did you mean 'expert_p'?")
    refuses(dataclasses.replace(SMOKE, plan=(*SMOKE.plan, "base")), "plan=", "'base'", "twice")


@pytest.mark.parametrize(
    ("changes", "needles"),
    [
        ({"task_vectors": {"exprt_a": 0.5}},
         ("stages.merge.task_vectors.exprt_a (an earlier stage)", "did you mean 'expert_a'?")),
        ({"task_vectors": {"merge": 0.5}}, ("stages.merge.task_vectors.merge", "'merge'")),
        ({"task_vectors": {"expert_a@999": 0.5}}, ("task_vectors.expert_a@999 wants step 999",)),
        ({"task_vectors": {"expert_a": 0.5}, "init": "scratch"}, ("init='scratch'", "as init")),
        ({"task_vectors": {"expert_a": 0.5}, "lora": LoraSettings(rank=2)}, ("set lora.rank=0",)),
    ],
)  # fmt: skip
def test_task_vectors_are_of_earlier_stages_and_whole_weights(changes, needles):
    refuses(with_stage(**changes), *needles)


def test_routes_and_baseline_name_stages_of_the_plan():
    routes = {"joint": ("jonit",)}
    x = dataclasses.replace(SMOKE, routes=routes)
    refuses(x, "routes.joint='jonit'", "did you mean 'joint'?")
    refuses(dataclasses.replace(SMOKE, baseline="bsae"), "baseline='bsae'", "'base'?")


@pytest.mark.parametrize(
    ("changes", "needles"),
    [
        ({"model": "studnet"}, ("stages.merge.model='studnet'", "'student'?")),
        ({"aggregation": "token_mean"}, ("stages.merge.aggregation='token_mean'", "'token-mean'?")),
        ({"domains": {"aritmetic": 1.0}}, ("stages.merge.domains='aritmetic'", "'arithmetic'?")),
        ({"dual_clip": 0.5}, ("stages.merge.dual_clip=0.5", "above 1")),
        (
            {"grpo": config.GrpoSettings(advantage_scale="sdt")},
            ("stages.merge.grpo.advantage_scale='sdt'", "'std'?"),
        ),
        ({"grpo": config.GrpoSettings(kl_kind="k4")}, ("stages.merge.grpo.kl_kind='k4'", "k3")),
        (
            {"opd": config.OpdSettings(top_k_form="renormalized")},
            ("stages.merge.opd.top_k_form='renormalized'", "'renormalised'?"),
        ),
    ],
)
def test_a_name_that_is_in_no_table_is_refused(changes, needles):
    refuses(with_stage(**changes), *needles)


# Sampling.


def test_s07_temperature_0_in_training_is_refused():
    sampling = part("expert_a", "sampling", temperature=0.0)
    refuses(
        with_stage("expert_a", sampling=sampling),
        "stages.expert_a.sampling.temperature=0",
        "no signal",
        "positive temperature",
    )
    refuses(with_stage(sampling=part("merge", "sampling", temperature=0.0)), "temperature=0")
    # A teacher may well write its completions greedily, and evaluation may be greedy.
    guards.check_experiment(with_stage("cold", sampling=Sampling(1, 10, temperature=0.0)), 1)
    greedy = dataclasses.replace(SMOKE, evaluation=EvaluationSettings(temperature=0.0, batch=16))
    guards.check_experiment(greedy, 1)


@pytest.mark.parametrize(("field", "value"), [("top_k", 5), ("top_p", 0.9)])
def test_truncated_sampling_in_training_is_refused(field, value):
    sampling = part("expert_a", "sampling", **{field: value})
    refuses(
        with_stage("expert_a", sampling=sampling),
        "stages.expert_a.sampling.top_k=",
        f"{field}={value}",
        "use top_k=0 and top_p=1",
    )


def test_grpo_with_one_sample_and_off_policy_exact_opd_are_refused():
    sampling = part("expert_a", "sampling", samples=1)
    refuses(with_stage("expert_a", sampling=sampling), "sampling.samples=1", "at least 2")
    refuses(with_stage(updates_per_rollout=2), "updates_per_rollout=2", "opd.loss='sampled'")
    guards.check_experiment(with_stage("sampled", updates_per_rollout=2), 1)


# Where weights come from.


@pytest.mark.parametrize(
    ("changes", "needles"),
    [
        ({"init": "stage"}, ("stages.merge.init='stage'", "write scratch, stage:NAME")),
        ({"init": "self"}, ("stages.merge.init='self'", "no initial model")),
        ({"init": "stage:bsae"}, ("stages.merge.init", "'bsae'", "did you mean 'base'?")),
        ({"init": "stage:cold"}, ("stages.merge.init (an earlier stage)='cold'",)),
        ({"init": "stage:merge"}, ("stages.merge.init (an earlier stage)='merge'",)),
        (
            {"teachers": {A: "stage:expert_a", P: "stage:cold"}},
            ("stages.merge.teachers.program (an earlier stage)='cold'",),
        ),
        (
            {"teachers": {A: "stage:expert_a", P: "expert_p"}},
            ("stages.merge.teachers.program='expert_p'", "self, random, fixed_negative"),
        ),
    ],
)
def test_init_and_teachers_are_known_places_and_earlier_stages(changes, needles):
    refuses(with_stage(**changes), *needles)


def test_d23_a_domain_without_a_teacher_is_refused():
    refuses(
        with_stage(teachers={A: "stage:expert_a"}),
        "stages.merge.teachers",
        "no teacher for domain(s) program",
        "'stage:NAME'",
    )
    refuses(with_stage("cold", teachers={}), "domain(s) arithmetic, program")


def test_a_teacher_of_no_domain_and_a_teacher_of_grpo_are_refused():
    teachers = {A: "stage:expert_a", P: "stage:expert_p", "logic": "self"}
    refuses(with_stage(teachers=teachers), "stages.merge.teachers: logic")
    refuses(
        with_stage("expert_a", teachers={A: "self"}), "stages.expert_a.teachers", "algorithm='opd'"
    )


def test_controls_that_cannot_do_what_the_stage_needs_are_refused():
    teachers = {A: "self", P: "stage:expert_p"}
    refuses(with_stage("cold", teachers=teachers), "stages.cold.teachers.arithmetic='self'")
    teachers = {A: "fixed_negative", P: "stage:expert_p"}
    refuses(with_stage("sampled", teachers=teachers), "fixed_negative", "all domains")
    both = dict.fromkeys((A, P), "fixed_negative")
    refuses(with_stage(teachers=both), "fixed_negative", "opd.loss='sampled'")
    guards.check_experiment(with_stage("sampled", teachers=both), 1)


def test_a_step_that_is_not_kept_or_never_reached_is_refused():
    teachers = {A: "stage:expert_a@2", P: "stage:expert_p"}
    x = with_stage(teachers=teachers)
    refuses(x, "stages.merge.teachers.arithmetic", "step 2", "add 2 to checkpoint.keep_steps=()")
    kept = dataclasses.replace(SMOKE.checkpoint, keep_steps=(2, 5))
    guards.check_experiment(dataclasses.replace(x, checkpoint=kept), 1)
    late = with_stage(teachers=teachers | {A: "stage:expert_a@5"})
    late = dataclasses.replace(late, checkpoint=kept)
    refuses(late, "step 5", "ends at 4", "stages.expert_a.steps")
    refuses(with_stage(init="stage:base@3"), "stages.merge.init", "step 3")


def test_an_init_from_another_model_is_refused():
    models = SMOKE.models | {"wide": config.ModelSettings(preset="nano_wide")}
    x = dataclasses.replace(SMOKE, models=models)
    refuses(with_stage(x=x, model="wide"), "stages.merge.model='wide'", "'student'")
    models["same"] = dataclasses.replace(SMOKE.models["student"], remat="full")
    guards.check_experiment(with_stage(x=x, model="same"), 1)


# What must divide.


def test_a_batch_that_does_not_divide_is_refused():
    refuses(with_stage(prompts=10), "stages.merge.prompts=10", "multiple of 4", shards=4)
    refuses(with_stage(micro_batches=3), "prompts=8", "3 micro-batch(es)", "multiple of 3")
    x = dataclasses.replace(SMOKE, evaluation=EvaluationSettings(batch=18))
    refuses(x, "evaluation.batch=18", "4 devices", "multiple", shards=4)


def test_weights_that_do_not_split_the_batch_are_refused_before_anything_runs():
    weights = {A: 0.4, P: 0.6}
    refuses(with_stage(domains=weights), "stages.merge.domains", "8 prompts", "nearest that do: ")
    refuses(with_stage("joint", domains={A: 1.0, P: 0.0}), "stages.joint.domains.program")


def test_the_rows_of_each_teacher_must_divide_too():
    weights = {A: 0.25, P: 0.75}  # 2 and 6 of 8 prompts; all 8 would divide by 4.
    for name in ("merge", "cold"):
        x = with_stage(name, domains=weights)
        refuses(x, f"stages.{name}.domains.arithmetic: 2 of 8", "4 equal pieces", shards=4)
        guards.check_experiment(x, 2)
    guards.check_experiment(with_stage("joint", domains=weights), 4)
    refuses(with_stage(domains=weights, micro_batches=4), "4 equal pieces (micro-batches times")


def test_batch_shards_are_the_devices_of_the_batch_axes(mesh_2x2x2):
    assert guards.batch_shards(mesh_2x2x2) == 4


# Models, tokenizers, teachers.


def test_a_model_with_fewer_rows_than_tokens_is_refused():
    tokens = SimpleNamespace(vocab_size=33)
    with pytest.raises(ValueError, match=r"models\.student has 32 rows .* 33 tokens; use the"):
        guards.check_model(tiny.CONFIG, "student", tokens)
    guards.check_model(tiny.CONFIG, "student", SimpleNamespace(vocab_size=32))


def test_a_context_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match=r"stages\.x: .* 65 tokens, .* made for 64; lower"):
        guards.check_length(tiny.CONFIG, "stages.x", 65)
    guards.check_length(tiny.CONFIG, "stages.x", 64)


def hf_folder(path, words=("a", "b", "c"), stop=(0,)):
    """A folder with a config.json and a word-level tokenizer.json that begins with <end>."""
    path.mkdir()
    vocabulary = {word: i for i, word in enumerate(("<end>", "<stop>", *words))}
    model = hf_tokenizers.models.WordLevel(vocabulary, unk_token=words[0])
    hf_tokenizers.Tokenizer(model).save(str(path / "tokenizer.json"))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(stop)}))
    (path / "config.json").write_text(hf_config.render(tiny.CONFIG, None, "float32"))
    return path


def teacher_check(*, config=tiny.CONFIG, params=(), columns=20):
    teacher = Teacher("stage:x", config, params, {})
    guards.check_teacher(teacher, "stages.merge.teachers.a", tiny.CONFIG, columns)


def test_d14_a_teacher_with_too_short_a_context_is_refused():
    short = tiny.CONFIG.replace(max_length=16)
    with pytest.raises(ValueError, match=r"teachers\.a \(the teacher\): .* 20 tokens, .* for 16"):
        teacher_check(config=short)


def test_a_teacher_with_another_vocabulary_size_is_refused():
    with pytest.raises(ValueError, match=r"teachers\.a: .* has 40 tokens, the student's 32"):
        teacher_check(config=tiny.CONFIG.replace(vocab_size=40))


def test_a_teacher_without_a_model_has_nothing_to_check():
    teacher_check(config=tiny.CONFIG.replace(vocab_size=99), params=None)


# Weights from outside.


def source_check(spec, own, *, teaches=True):
    guards.check_source(spec, "stages.merge.teachers.a", own, teaches=teaches)


def test_t12_a_teacher_with_other_tokens_is_refused(tmp_path):
    own = tokenizer.load(str(hf_folder(tmp_path / "student")))
    other = hf_folder(tmp_path / "teacher", words=("a", "c", "b"))
    for teaches, message in (
        (True, r"2 of 5 token ids mean .* \(id: student / teacher\) 3: 'b' / 'c', 4: 'c'"),
        (False, "token 3 is 'b' .* 'c' in the second"),
    ):
        with pytest.raises(ValueError, match=rf"teachers\.a=.*{message}"):
            source_check(f"hf:{other}", own, teaches=teaches)
    source_check(f"hf:{hf_folder(tmp_path / 'equal')}", own)


def test_t10_a_teachers_vocabulary_may_end_elsewhere_and_an_inits_may_not(tmp_path):
    own = tokenizer.load(str(hf_folder(tmp_path / "student")))
    for name, words in (("more", ("a", "b", "c", "d")), ("fewer", ("a", "b"))):
        other = hf_folder(tmp_path / name, words=words)
        source_check(f"hf:{other}", own)
        with pytest.raises(ValueError, match="vocabulary sizes are 5 and"):
            source_check(f"hf:{other}", own, teaches=False)
    # A teacher that lacks the student's stop could never reward it.
    last = tokenizer.load(str(hf_folder(tmp_path / "last", stop=(4,))))
    with pytest.raises(ValueError, match=r"stops at \['c'\] \(ids \[4\]\), .* ends at 4"):
        source_check(f"hf:{tmp_path / 'fewer'}", last)


def test_d19_a_teacher_with_other_stop_tokens_is_refused(tmp_path):
    own = tokenizer.load(str(hf_folder(tmp_path / "student")))
    for name, stop in (("instruct", (1,)), ("more", (0, 1))):
        other = hf_folder(tmp_path / name, stop=stop)
        with pytest.raises(ValueError, match=r"stops at tokens \[.*1\], the student at \[0\]: .*"):
            source_check(f"hf:{other}", own)
        source_check(f"hf:{other}", own, teaches=False)  # An init stops where the student stops.
    two = tokenizer.load(str(hf_folder(tmp_path / "two", stop=(1, 0))))
    source_check(f"hf:{tmp_path / 'more'}", two)  # The order does not matter.


def test_weights_that_are_not_there_are_refused_before_anything_is_trained(tmp_path):
    own = tokenizer.load("nano")
    for kind in ("hf", "orbax"):
        with pytest.raises(ValueError, match=rf"teachers\.a='{kind}:.*nowhere"):
            source_check(f"{kind}:{tmp_path / 'nowhere'}", own)
    for spec in ("self", "random", "stage:x", "scratch"):
        source_check(spec, own)


def test_a_model_that_cannot_be_imported_is_refused_before_anything_is_trained(tmp_path):
    folder = hf_folder(tmp_path / "odd")
    own = tokenizer.load(str(folder))
    content = json.loads((folder / "config.json").read_text()) | {"architectures": ["OddModel"]}
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"teachers\.a='hf:.*OddModel"):
        source_check(f"hf:{folder}", own)


def test_a_checkpoint_of_another_tokenizer_is_refused(tmp_path):
    own, other = (
        tokenizer.load(str(hf_folder(tmp_path / name, words=words)))
        for name, words in (("own", ("a", "b")), ("other", ("b", "a")))
    )
    for name, t in (("mine", own), ("theirs", other)):
        with checkpoint.Checkpointer(tmp_path / name, keep_newest=1) as saves:
            saves.save(1, {"params": {"w": np.ones(2)}}, {"tokenizer": t.fingerprint()})
    source_check(f"orbax:{tmp_path / 'mine'}", own)
    with pytest.raises(ValueError, match=r"teachers\.a='orbax:.*theirs': .* another tokenizer"):
        source_check(f"orbax:{tmp_path / 'theirs'}", own)


# The ratio on the real weights.


def context(mesh, **changes):
    stage = Stage(
        algorithm="grpo",
        init="scratch",
        domains={"a": 1.0},
        teachers={},
        sampling=Sampling(samples=2, max_new_tokens=5, temperature=0.7),
    )
    whole = Context(
        stage=stage, seed=0, config=SMALL, mesh=mesh, tokenizer=None, ranges={}, teachers={},
        reference=None,
    )  # fmt: skip
    return dataclasses.replace(whole, **changes)


def test_sampler_and_scorer_agree_on_the_same_weights(mesh):
    worst = guards.check_ratio(context(mesh), tiny.params(mesh, SMALL), tiny.prompts(mesh))
    assert 0 <= worst < 1e-5


def test_a_scorer_at_another_temperature_is_refused(mesh, monkeypatch):
    """Negative control: the check must see a scorer that forgets the temperature."""
    made = steps.make_score_step
    monkeypatch.setattr(steps, "make_score_step", lambda config, _, top_k: made(config, 1.0, top_k))
    with pytest.raises(ValueError, match=r"by up to 0\.\d+ nats .*limit 0\.001 for float32"):
        guards.check_ratio(context(mesh), tiny.params(mesh, SMALL), tiny.prompts(mesh))


def test_weights_that_are_not_numbers_are_refused(mesh):
    params = tiny.params(mesh, SMALL)
    params = params | {"final_norm": params["final_norm"] * jax.numpy.nan}
    with pytest.raises(ValueError, match="disagree on the same weights by up to nan"):
        guards.check_ratio(context(mesh), params, tiny.prompts(mesh))


def test_the_check_scores_as_the_stage_does():
    """So that it compiles no step of its own."""
    stages = SMOKE.stages
    assert guards.config_top_k(stages["sampled"]) == stages["sampled"].opd.top_k
    assert guards.config_top_k(stages["merge"]) == 0
    assert guards.config_top_k(stages["expert_a"]) == 0
