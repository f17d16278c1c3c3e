"""The numbers of results.json, on small workdirs whose answers are known by hand."""

import json

import numpy as np
import pytest
import synthetic_records as synthetic

from opd_jax.report import curves, logs, results, statistics


def answers(accuracy, problems=10):
    """One sample per problem, the first `accuracy` of them right."""
    return [[int(problem < round(accuracy * problems))] for problem in range(problems)]


def add_stage(root, spec, points, domains=("a", "b"), *, total=None, finished=True):
    """A stage with the given {step: (flops, accuracy of every domain)} on the test split."""
    (root / spec["name"]).mkdir(exist_ok=True)
    for step, (flops, accuracy) in points.items():
        for domain in domains:
            synthetic.write_eval(root, spec["name"], step, domain, flops, answers(accuracy))
    if finished:
        total = max(flops for flops, _ in points.values()) if total is None else total
        result = {
            "name": spec["name"],
            "algorithm": spec["algorithm"],
            "steps": max(points),
            "selected_step": max(points),
            "flops": {"update": total, "evaluation": 5.0, "remat": 7.0},
            "flops_total": total,
            "stopped_by": "plateau",
            "seconds": 1.0,
        }
        (root / spec["name"] / "result.json").write_text(json.dumps(result))


def by_hand(
    root, *, teachers=None, merge=None, joint=None, finished=("merge", "joint"), baseline="base"
):
    """Experts for 20 FLOPs each; by default merge has 0.5 after 20 more, joint 0.5 at 100."""
    teachers = {"a": "stage:expert_a", "b": "stage:expert_b"} if teachers is None else teachers
    stages = [
        synthetic.stage("base", "sft", "scratch", ["a", "b"]),
        synthetic.stage("expert_a", "grpo", "base", ["a"]),
        synthetic.stage("expert_b", "grpo", "base", ["b"]),
        synthetic.stage("merge", "opd", "base", ["a", "b"], teachers),
        synthetic.stage("joint", "grpo", "base", ["a", "b"]),
    ]
    routes = {"divide_and_merge": ["expert_a", "expert_b", "merge"], "joint": ["joint"]}
    synthetic.write_plan(root, stages, routes, baseline)
    add_stage(root, stages[0], {5: (50.0, 0.2)})
    add_stage(root, stages[1], {0: (0.0, 0.2), 4: (10.0, 0.4), 8: (20.0, 0.6)})
    add_stage(root, stages[2], {0: (0.0, 0.2), 8: (20.0, 0.6)})
    merge = merge or {0: (0.0, 0.2), 2: (20.0, 0.5)}
    add_stage(root, stages[3], merge, finished="merge" in finished)
    joint = joint or {0: (0.0, 0.0), 5: (100.0, 0.5), 9: (200.0, 1.0)}
    add_stage(root, stages[4], joint, finished="joint" in finished)
    return root


def test_flops_at_interpolates_the_running_maximum():
    flops_T = np.array([0.0, 10.0, 20.0, 30.0])
    accuracy_WT = np.tile([0.2, 0.6, 0.5, 0.8], (6, 1))
    target_W = np.array([0.1, 0.2, 0.4, 0.6, 0.7, 0.9])
    found_W = curves.flops_at(flops_T, accuracy_WT, target_W)
    np.testing.assert_allclose(found_W, [0.0, 0.0, 5.0, 10.0, 25.0, np.inf])


def test_flops_at_of_a_flat_or_single_point_curve():
    flat = curves.flops_at(np.array([3.0, 4.0]), np.full((1, 2), 0.5), np.array([0.5]))
    single = curves.flops_at(np.array([3.0]), np.full((1, 1), 0.5), np.array([0.6]))
    assert (flat[0], single[0]) == (3.0, np.inf)


def test_comparison_by_hand(tmp_path):
    comparison = results.collect(by_hand(tmp_path))["comparison"]
    assert comparison["routes"] == ["divide_and_merge", "joint"]
    assert comparison["target_accuracy"] == pytest.approx(0.5)
    assert comparison["flops"] == pytest.approx({"divide_and_merge": 60.0, "joint": 100.0})
    assert comparison["saving"] == pytest.approx(0.4)
    assert comparison["saving_whole_run"] == pytest.approx(1 - 60 / 200)
    assert comparison["distill_share"] == pytest.approx(20 / 40)
    assert comparison["recovery"]["mean"] == pytest.approx(0.5 / 0.6)
    assert comparison["gap_recovery"]["mean"] == pytest.approx((0.5 - 0.2) / (0.6 - 0.2))
    assert comparison["notes"] == []


def test_a_saving_may_be_negative(tmp_path):
    found = results.collect(by_hand(tmp_path, joint={0: (0.0, 0.2), 5: (20.0, 0.5)}))
    assert found["comparison"]["saving"] == pytest.approx(1 - 60 / 20)


def test_contract_of_results_json(tmp_path):
    found = results.collect(by_hand(tmp_path))
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert {"name", "seed", "config", "versions", "stages", "routes", "comparison"} <= set(found)
    merge = found["stages"]["merge"]
    assert {"algorithm", "steps", "flops", "flops_total", "accuracy", "length"} <= set(merge)
    assert merge["flops"] == {"update": 20.0, "evaluation": 5.0, "remat": 7.0}
    assert merge["flops_total"] == 20.0
    assert set(merge["accuracy"]["a"]) == {"mean", "ci95", "n"}
    assert merge["accuracy"]["a"]["mean"] == pytest.approx(0.5)
    assert merge["accuracy"]["a"]["n"] == 10
    route = found["routes"]["divide_and_merge"]
    assert route["flops_total"] == 60.0
    assert route["accuracy"]["mean"] == pytest.approx(0.5)
    assert [point["flops"] for point in route["curve"]] == [40.0, 60.0]
    assert found["unfinished"] == []
    assert found["measure"] == {"greedy": False, "samples": 1}


def test_selected_step_levels_pass_at_k_lengths_and_gain(tmp_path):
    root = by_hand(tmp_path)
    spec = synthetic.stage("merge", "opd", "base", ["a", "b"], {})
    (root / "merge" / "evals.jsonl").unlink()
    correct = [[1, 1], [1, 0], [0, 0], [0, 0]]
    synthetic.write_eval(root, "merge", 1, "a", 10.0, correct, level=[1, 1, 2, 2])
    synthetic.write_eval(root, "merge", 2, "a", 20.0, [[1, 1]] * 4, level=[1, 1, 2, 2])
    synthetic.write_eval(root, "merge", 1, "a", 10.0, [[1, 1]] * 4, split="validation")
    synthetic.write_eval(root, "merge", 1, "a", 10.0, [[1], [1], [1], [0]], greedy=True)
    synthetic.write_result(root, spec, 2, selected=1)
    merge = results.collect(root)["stages"]["merge"]
    assert merge["accuracy"]["a"]["mean"] == pytest.approx(3 / 8)
    assert merge["greedy"]["a"]["mean"] == pytest.approx(3 / 4)
    assert {k: v["mean"] for k, v in merge["pass_at_k"]["a"].items()} == pytest.approx(
        {"1": 3 / 8, "2": 1 / 2}
    )
    levels = merge["by_level"]["a"]
    assert {k: (v["mean"], v["n"]) for k, v in levels.items()} == {"1": (0.75, 2), "2": (0.0, 2)}
    assert merge["length"]["a"] == pytest.approx(np.mean([10, 10, 10, 14, 15, 15, 15, 15]))
    assert merge["truncated"]["a"] == 0.0
    assert merge["gain"]["a"]["mean"] == pytest.approx(3 / 8 - 2 / 10)


def test_saving_interval_equals_a_plain_loop_over_resamples(tmp_path):
    root = synthetic.write(tmp_path, problems=30, samples=2)
    records = logs.read(root)
    found = results.summarise(records)["comparison"]
    ids = {d: np.arange(7, 37) for d in synthetic.DOMAINS}
    bootstrap = statistics.ProblemBootstrap.over(ids)
    before = sum(records.flops_total(f"expert_{d}") for d in synthetic.DOMAINS)

    def saving(counts, reference_counts):
        curves = {}
        for name, offset, weights in (("merge", before, counts), ("joint", 0.0, reference_counts)):
            flops, accuracy = [], []
            for point in records.stages[name].held_out(greedy=False).values():
                means = [
                    np.repeat(e.correct_Pn.mean(axis=1), weights[d].astype(int)).mean()
                    for d, e in point.items()
                ]
                flops.append(offset + point["program"].flops)
                accuracy.append(max([np.mean(means), *accuracy[-1:]]))
            curves[name] = flops, accuracy
        target = min(accuracy[-1] for _, accuracy in curves.values())
        costs = {}
        for name, (flops, accuracy) in curves.items():
            after = next(i for i, value in enumerate(accuracy) if value >= target - 1e-12)
            rising = slice(max(after - 1, 0), after + 1)
            costs[name] = np.interp(target, accuracy[rising], flops[rising])
        return 1 - costs["merge"] / costs["joint"]

    def interval(shift):
        rows = range(1, 1001)
        draw = [{d: bootstrap.counts[d][w] for d in ids} for w in range(1001)]
        values = np.sort([saving(draw[w], draw[(w + shift - 1) % 1000 + 1]) for w in rows])
        return values[24], values[-25]

    everything = {d: np.ones(30) for d in ids}
    assert found["saving"] == pytest.approx(saving(everything, everything))
    assert found["saving_ci95"] == pytest.approx(interval(0))
    # Routes resampled independently of each other would be another, wider interval.
    low, high = interval(1)
    assert high - low > 1.05 * (found["saving_ci95"][1] - found["saving_ci95"][0])


@pytest.mark.parametrize("unfinished", [["merge"], ["joint"], ["expert_a", "merge", "joint"]])
def test_unfinished_routes_are_not_compared(tmp_path, unfinished):
    root = by_hand(tmp_path)
    for name in unfinished:
        (root / name / "result.json").unlink()
    found = results.collect(root)
    assert found["unfinished"] == unfinished
    assert not set(unfinished) & set(found["stages"])
    assert found["comparison"]["saving"] is None
    assert "not finished" in found["comparison"]["notes"][0]
    json.dumps(found, allow_nan=False)


def test_an_unfinished_last_stage_still_has_a_curve(tmp_path):
    found = results.collect(by_hand(tmp_path, finished=["joint"]))
    route = found["routes"]["divide_and_merge"]
    assert [point["flops"] for point in route["curve"]] == [40.0, 60.0]
    assert route["accuracy"] is route["flops_total"] is route["distill_share"] is None


def test_a_plan_that_has_only_started(tmp_path):
    stages = [synthetic.stage("base", "sft", "scratch", ["a"])]
    synthetic.write_plan(tmp_path, stages, {}, "base")
    found = results.collect(tmp_path)
    assert found["stages"] == found["routes"] == {}
    assert found["measure"] == {"greedy": False, "samples": None}


def test_sft_alone_has_no_routes_to_compare(tmp_path):
    stages = [synthetic.stage("base", "sft", "scratch", ["a"])]
    synthetic.write_plan(tmp_path, stages, {}, None)
    add_stage(tmp_path, stages[0], {5: (50.0, 0.3)}, ["a"])
    found = results.collect(tmp_path)
    assert found["stages"]["base"]["accuracy"]["a"]["mean"] == pytest.approx(0.3)
    assert found["comparison"]["notes"] == ["There are no two routes to compare."]
    assert found["comparison"]["distill_share"] is None


def test_one_route_keeps_its_own_shares(tmp_path):
    root = by_hand(tmp_path)
    plan = json.loads((root / "plan.json").read_text())
    del plan["routes"]["joint"]
    (root / "plan.json").write_text(json.dumps(plan))
    comparison = results.collect(root)["comparison"]
    assert comparison["distill_share"] == pytest.approx(0.5)
    assert comparison["saving"] is None


def test_a_fixed_target_that_one_route_never_reaches(tmp_path):
    comparison = results.collect(by_hand(tmp_path), target_accuracy=0.8)["comparison"]
    assert comparison["flops"] == {"divide_and_merge": None, "joint": pytest.approx(160.0)}
    assert comparison["saving"] is comparison["saving_ci95"] is None
    (note,) = comparison["notes"]
    assert note.startswith("divide_and_merge never reaches the target of 80.0% (its best is 50.0%)")


def test_a_route_that_never_improves_leaves_no_saving(tmp_path):
    flat = {0: (0.0, 0.2), 5: (20.0, 0.2)}
    comparison = results.collect(by_hand(tmp_path, merge=flat, joint=flat))["comparison"]
    assert comparison["flops"]["joint"] == 0.0
    assert comparison["saving"] is None
    assert "never improved" in comparison["notes"][0]


def test_nothing_is_recovered_from_experts_that_know_nothing(tmp_path):
    root = by_hand(tmp_path)
    for path in root.glob("*/evals.jsonl"):
        path.write_text(path.read_text().replace("[1]", "[0]"))
    comparison = results.collect(root)["comparison"]
    assert comparison["recovery"] is comparison["gap_recovery"] is None


def test_an_earlier_teacher_is_measured_at_the_step_that_taught(tmp_path):
    found = results.collect(by_hand(tmp_path, teachers={"a": "stage:expert_a@4"}))
    route = found["routes"]["divide_and_merge"]
    assert route["experts"] == {"a": "expert_a"}
    assert route["recovery"]["mean"] == pytest.approx(0.5 / 0.4)
    assert route["distill_share"] == pytest.approx(20 / 20)


@pytest.mark.parametrize("teacher", ["hf:some/model", "self", "joint"])
def test_a_teacher_from_elsewhere_has_no_known_cost(tmp_path, teacher):
    found = results.collect(by_hand(tmp_path, teachers={"a": teacher}))
    route = found["routes"]["divide_and_merge"]
    assert route["distill_share"] is route["recovery"] is None
    assert found["comparison"]["saving"] == pytest.approx(0.4)


def test_no_test_evaluation_at_the_selected_step_is_said(tmp_path):
    root = by_hand(tmp_path)
    synthetic.write_result(root, synthetic.stage("joint", "grpo", "base", ["a"]), 9, selected=7)
    found = results.collect(root)
    assert found["stages"]["joint"]["accuracy"] == {}
    assert found["routes"]["joint"]["accuracy"] is None
    assert "Stage joint: no test evaluation at its selected step 7" in found["notes"][0]


def test_phases_that_do_not_add_up_are_said(tmp_path):
    root = by_hand(tmp_path)
    path = root / "merge" / "result.json"
    path.write_text(path.read_text().replace('"update": 20.0', '"update": 21.0'))
    assert "phases add up to 21 FLOPs, its total says 20" in results.collect(root)["notes"][0]


def test_greedy_answers_count_only_where_none_are_sampled(tmp_path):
    root = by_hand(tmp_path)
    for path in root.glob("*/evals.jsonl"):
        path.write_text(path.read_text().replace('"greedy": false', '"greedy": true'))
    found = results.collect(root)
    assert found["measure"]["greedy"]
    assert found["comparison"]["saving"] == pytest.approx(0.4)
    synthetic.write_eval(root, "joint", 9, "a", 200.0, answers(0.9))
    found = results.collect(root)
    assert not found["measure"]["greedy"]
    assert found["stages"]["joint"]["accuracy"]["a"]["mean"] == pytest.approx(0.9)


def test_fewer_problems_in_some_evaluations_are_no_obstacle(tmp_path):
    root = by_hand(tmp_path)
    path = root / "merge" / "evals.jsonl"
    path.unlink()
    for domain in ("a", "b"):
        synthetic.write_eval(root, "merge", 0, domain, 0.0, answers(0.25, problems=4))
        synthetic.write_eval(root, "merge", 2, domain, 20.0, answers(0.5))
    assert results.collect(root)["comparison"]["saving"] == pytest.approx(0.4)


def test_a_step_logged_twice_counts_once_as_last_written(tmp_path):
    root = by_hand(tmp_path)
    for domain in ("a", "b"):
        synthetic.write_eval(root, "merge", 2, domain, 20.0, answers(0.4))
    found = results.collect(root)
    assert found["routes"]["divide_and_merge"]["accuracy"]["mean"] == pytest.approx(0.4)


def test_the_order_of_the_lines_does_not_matter(tmp_path):
    root = by_hand(tmp_path)
    expected = results.collect(root)["comparison"]
    for path in root.glob("*/evals.jsonl"):
        path.write_text("\n".join(reversed(path.read_text().splitlines())))
    assert results.collect(root)["comparison"] == expected | {"domains": ["b", "a"]}


def test_experts_measured_on_their_own_domain_only(tmp_path):
    root = by_hand(tmp_path)
    expected = results.collect(root)["comparison"]
    for domain, other in (("a", "b"), ("b", "a")):
        path = root / f"expert_{domain}" / "evals.jsonl"
        lines = [x for x in path.read_text().splitlines() if f'"domain": "{other}"' not in x]
        path.write_text("\n".join(lines))
    assert results.collect(root)["comparison"] == expected


def test_a_line_cut_by_a_kill_is_left_out_and_noted(tmp_path):
    root = by_hand(tmp_path)
    expected = results.collect(root)["comparison"]
    with (root / "joint" / "evals.jsonl").open("a") as file:
        file.write('{"step": 9, "spl')
    found = results.collect(root)
    assert found["comparison"] == expected
    assert found["notes"] == ["joint/evals.jsonl, line 7: not JSON, left out."]


def test_overlap_is_the_mean_of_the_first_and_last_tenth(tmp_path):
    root = by_hand(tmp_path)
    rows = [
        {"step": t + 1, "seconds": 0, "flops": {}, "flops_total": 0}
        | {"metrics": {"overlap_ratio/expert_a": t / 20}}
        for t in range(20)
    ]
    (root / "merge" / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    overlap = results.collect(root)["stages"]["merge"]["overlap"]
    assert overlap["expert_a"] == pytest.approx({"start": 0.5 / 20, "end": 18.5 / 20})


def test_nan_and_infinity_become_null():
    value = {1: np.float32("nan"), "b": [float("inf"), np.int64(3), (np.array([0.5]), None)]}
    assert results.finite(value) == {"1": None, "b": [None, 3, [[0.5], None]]}


def test_a_workdir_without_a_plan_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"plan\.json: missing; give the --workdir"):
        results.collect(tmp_path)


def test_a_plan_without_a_key_is_an_error(tmp_path):
    (tmp_path / "plan.json").write_text('{"name": "x"}')
    with pytest.raises(ValueError, match=r"plan\.json: missing \['seed'.*found \['name'\]"):
        results.collect(tmp_path)


def test_a_route_of_an_unknown_stage_is_an_error(tmp_path):
    stages = [synthetic.stage("base", "sft", "scratch", ["a"])]
    synthetic.write_plan(tmp_path, stages, {"joint": ["jiont"]}, "base")
    with pytest.raises(ValueError, match=r"'joint' names stage 'jiont'; known stages: \['base'\]"):
        results.collect(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("correct", [[1, 0], [1]], "'correct' must hold the same number of samples"),
        ("length", [[1]], "'length' must hold the same number of samples.*2 problems"),
        ("id", [4, 4], "'id' names a problem twice"),
    ],
)
def test_a_malformed_evaluation_is_named(tmp_path, field, value, message):
    root = by_hand(tmp_path)
    path = root / "joint" / "evals.jsonl"
    path.unlink()
    synthetic.write_eval(root, "joint", 3, "a", 1.0, [[1], [0]])
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ValueError, match=f"step 3, test, a: {message}"):
        results.collect(root)
