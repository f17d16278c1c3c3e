"""reasoning-gym tasks as domains: their own answers count, and no answer runs as a program."""

import ast
import inspect
import json
import time

import pytest

from opd_jax import domains
from opd_jax.data.problem import SPLITS

gym = pytest.importorskip("reasoning_gym", reason="needs the extra `reasoning`: reasoning-gym")

from opd_jax.domains import reasoning  # noqa: E402  (it imports the package only when used)

# Whose levels 1 and 2 cannot be made by the curriculum alone, or take many seconds to make.
NEED_OPTIONS = {"knight_swap": {"min_nodes": 6, "max_nodes": 8}}
SLOW = {"sokoban", "jugs"}
TASKS = sorted(set(gym.factory.DATASETS) - {"composite"} - SLOW)


def load(tmp_path, task="chain_sum", levels=(1,), split="train", size=60, **options):
    """A few problems of a task."""
    return domains.load(
        f"reasoning:{task}", split, levels, str(tmp_path), options=options, size=size
    )


def some(task, count):
    """The first problems of level 1."""
    options = {"all": NEED_OPTIONS[task]} if task in NEED_OPTIONS else {}
    return list(reasoning._of_level(task, 1, options, count))


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_every_tasks_own_answer_counts_and_another_does_not(task):
    problems = some(task, 3)
    assert len(problems) == 3
    for p in problems:
        domains.VERIFIERS["reasoning"].check(p.answer)
        for text in ("", "x", "<answer></answer>", "\ud800\0", "(" * 500):
            assert not domains.verify(p, text)
        if p.solutions:
            text = p.solutions["terse"]
            assert domains.verify(p, text)
            assert domains.verify(p, f"I think <answer>1</answer>, no: <answer>{text}</answer>.")


def test_a_task_is_a_domain(tmp_path):
    splits = {split: load(tmp_path, split=split) for split in SPLITS}
    prompts = [p.prompt for problems in splits.values() for p in problems]
    assert len(set(prompts)) == len(prompts) > 40
    p = splits["train"][0]
    assert p.domain == "reasoning:chain_sum"
    assert p.prompt.startswith("State the final answer to the following arithmetic problem: ")
    gold = p.solutions["terse"]
    for right in (
        gold,
        f"{gold}.0",
        f"the answer is {gold}",
        rf"\boxed{{{gold}}}",
        f"Answer: {gold}",
    ):
        assert domains.verify(p, right), right
    for wrong in (
        f"{gold}1",
        f"the answer is {gold}, or {gold}1",
        f"<answer>1{gold}</answer> {gold}",
    ):
        assert not domains.verify(p, wrong), wrong
    assert list(load(tmp_path)) == list(splits["train"])  # As read from disk the second time.


def test_levels_follow_the_curriculum_and_options_change_them(tmp_path):
    easy, hard = (
        [json.loads(p.answer)["entry"]["metadata"] for p in load(tmp_path, levels=(level,))]
        for level in (1, 4)
    )
    assert max(m["num_terms"] for m in easy) < max(m["num_terms"] for m in hard)
    options = {"all": {"min_digits": 1, "max_digits": 1}, "2": {"min_terms": 3, "max_terms": 3}}
    made = load(tmp_path, levels=(1, 2), **options)
    for p in made:
        m = json.loads(p.answer)["entry"]["metadata"]
        assert m["num_digits"] == 1
        assert p.level == 1 or m["num_terms"] == 3
    assert {p.level for p in made} == {1, 2}


@pytest.mark.parametrize(
    ("task", "levels", "options", "message"),
    [
        ("chainsum", (1,), {}, "unknown reasoning-gym task 'chainsum'; did you mean 'chain_sum'"),
        ("chain_sum", (40,), {}, r"chain_sum has no level 40 of its own; give options\['40'\]"),
        ("chain_sum", (1,), {"all": {"terms": 3}}, "terms.*there are.*max_terms"),
        ("chain_sum", (1,), {"1": {"min_terms": 0}}, "min_terms must be positive"),
        ("chain_sum", (1,), {"2": {"min_terms": 2}}, r"options for \['2'\]; they may be for 'all'"),
    ],
)
def test_what_cannot_be_made_is_named(tmp_path, task, levels, options, message):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, task, levels, **options)


def test_options_of_another_source_are_refused():
    with pytest.raises(ValueError, match="only reasoning:TASK has any"):
        domains.Source("arithmetic", options={"all": {"a": 1}})


def test_answers_of_any_python_type_are_kept_exactly():
    value = {"a": (1, [2, (3,)]), "b": {4: {5, 6}}, "c": {"x": None, "y": 1.5}}
    stored = json.loads(json.dumps(reasoning._pack(value)))
    assert reasoning._unpack(stored) == value
    assert json.loads(json.dumps({"a": (1,)})) != {"a": (1,)}  # Control: JSON alone does not.


def test_a_broken_answer_is_found_when_problems_are_loaded(tmp_path):
    for answer in ("7", '{"task": "chain_sum"}', '{"task": "no", "config": {}, "entry": {}}',
                   '{"task": "chain_sum", "config": {}, "entry": {}}'):  # fmt: skip
        line = {"prompt": "a", "answer": answer, "verifier": "reasoning", "split": "train"}
        (tmp_path / "x.jsonl").write_text(json.dumps(line))
        with pytest.raises(ValueError, match="reasoning answer"):
            domains.load(f"jsonl:{tmp_path}/x.jsonl", "train", [1], "")


def test_r28_no_answer_is_run_as_a_program(tmp_path):
    mark = tmp_path / "mark"
    programs = [
        f"open({str(mark)!r}, 'w').close()",
        f"[open({str(mark)!r}, 'w')]",
        f"__import__('pathlib').Path({str(mark)!r}).touch()",
        f"().__class__.__base__.__subclasses__() or open({str(mark)!r}, 'w')",
    ]
    for task in reasoning.ROWS | reasoning.EXPRESSIONS:
        (p,) = some(task, 1)
        for text in programs:
            assert not domains.verify(p, text)
            assert not domains.verify(p, f"<answer>{text}</answer>")
    assert not mark.exists()
    # Control: the package's own scorer does run it.
    p = some("binary_matrix", 1)[0]
    entry = reasoning._unpack(json.loads(p.answer)["entry"])
    reasoning._dataset("binary_matrix", {"seed": 0, "size": 1}).score_answer(programs[0], entry)
    assert mark.exists()


def test_r15_no_power_is_too_large():
    start = time.monotonic()
    p = some("countdown", 1)[0]
    for text in ("9**9**9**9", "((9**99)**99)**99", "(9**99)**(9**9)", "9!!!", "2**(99*99*99)",
                 "9^9^9^9", "+" * 3000 + "1", "(" * 3000 + "1"):  # fmt: skip
        assert not domains.verify(p, text), text
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("text", "passes"),
    [("3*(4+5)-1", True), ("x**2/2 + C", True), ("sin(2*x)**3 - exp(-x)", True),
     ("x**(1/2) + 1.5*log(x)", True), ("a.b", False), ("S(9)", False), ("x(1)", False),
     ("9 if 1 else 2", False), ("[1]", False), ("9**9**9", False), ("lambda: 1", False)],
)  # fmt: skip
def test_expressions_that_sympy_may_see(text, passes):
    assert reasoning._harmless("countdown", text) is passes


def test_every_task_that_evaluates_answers_is_known():
    """Reads the installed package: a new version may bring others."""
    found = set()
    for name, (dataset_class, _) in gym.factory.DATASETS.items():
        tree = ast.parse(inspect.getsource(inspect.getmodule(dataset_class)))
        scorers = [
            node for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and "score" in node.name
        ]  # fmt: skip
        calls = {
            node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            for scorer in scorers
            for node in ast.walk(scorer)
            if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute))
            for arg in node.args[:1]
            if "answer" in ast.unparse(arg) and "entry" not in ast.unparse(arg)
        }
        if calls & {"eval", "exec", "parse_expr", "sympify"}:
            found.add(name)
    assert found == reasoning.ROWS | reasoning.EXPRESSIONS


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(reasoning.importlib.sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"install it: pip install 'opd_jax\[reasoning\]'"):
        load(tmp_path)
