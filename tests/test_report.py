"""The written report: files, words and numbers in it, on synthetic records in every state."""

import csv
import html.parser
import itertools
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import synthetic_records as synthetic

from opd_jax.report import logs, markup, page, results, sweep, tabular, training


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run's workdir, and what `write` returned for the console."""
    root = synthetic.write(tmp_path_factory.mktemp("run"), problems=60)
    return root, page.write(root)


class Page(html.parser.HTMLParser):
    """Visible text, and all that a page would load."""

    def __init__(self, text):
        super().__init__()
        self.text, self.loads, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text.append(data)


def test_the_three_files_agree_with_collect(finished):
    root, _ = finished
    assert json.loads((root / "results.json").read_text()) == results.collect(root)
    assert (root / "report.md").exists()


def test_the_page_is_whole_and_loads_nothing(finished):
    root, _ = finished
    shown = Page((root / "report.html").read_text())
    assert shown.open == []
    assert len(shown.loads) == 8
    assert all(load.startswith("data:") for load in shown.loads)
    text = " ".join(shown.text)
    for heading in ("Numbers", "More plots", "Definitions", *page.DEFINITIONS):
        assert heading in text


def test_the_style_sheet_reaches_the_browser_unescaped(finished):
    style = re.search(r"<style>(.*?)</style>", (finished[0] / "report.html").read_text(), re.S)[1]
    assert "&" not in style


def test_headline_numbers_are_in_the_page_the_markdown_and_the_console(finished):
    root, console = finished
    comparison = results.collect(root)["comparison"]
    page = " ".join(Page((root / "report.html").read_text()).text)
    for text in (page, (root / "report.md").read_text(), console):
        assert f"To reach {comparison['target_accuracy']:.1%} mean held-out accuracy" in text
        for spent in comparison["flops"].values():
            assert tabular.flops(spent) in text
        assert tabular.percent(comparison["saving"]) in text
        assert f"cost {comparison['distill_share']:.1%} of what training them" in text
        assert tabular.interval(comparison["recovery"]) in text


def test_no_number_is_nan_none_or_infinite(finished):
    root, console = finished
    page = " ".join(Page((root / "report.html").read_text()).text)
    for text in (page, (root / "report.md").read_text(), console):
        assert not re.search(r"\b(nan|None|inf)\b", text)


def test_markdown_tables_are_rectangular(finished):
    lines = (finished[0] / "report.md").read_text().splitlines()
    for above, below in itertools.pairwise(lines):
        if above.startswith("|") and below.startswith("|"):
            assert above.count("|") == below.count("|")


def test_the_same_records_make_the_same_files(finished):
    root, console = finished
    before = {name: (root / name).read_bytes() for name in ("report.html", "report.md")}
    assert page.write(root) == console
    assert before == {name: (root / name).read_bytes() for name in before}


@pytest.mark.parametrize(
    "unfinished",
    [["merge"], ["expert_arithmetic", "merge", "joint"]],
)
def test_any_state_of_a_run_gives_a_report(tmp_path, unfinished):
    root = synthetic.write(
        tmp_path, domains=["arithmetic"], problems=12, samples=1, unfinished=unfinished
    )
    console = page.write(root)
    assert f"{unfinished[-1]}." in console.splitlines()[-1]
    assert "not finished" in console
    assert Page((root / "report.html").read_text()).open == []


def test_a_run_that_has_logged_nothing_yet(tmp_path):
    synthetic.write_plan(tmp_path, [synthetic.stage("base", "sft", "scratch", ["a"])], {}, "base")
    assert "Not finished: base." in page.write(tmp_path)


def test_a_run_without_routes_says_what_its_stages_reached(tmp_path):
    spec = synthetic.stage("base", "sft", "scratch", ["a"])
    synthetic.write_plan(tmp_path, [spec], {}, None)
    synthetic.write_eval(tmp_path, "base", 3, "a", 1e9, [[1], [0]])
    synthetic.write_result(tmp_path, spec, 3)
    assert "base (sft) took 3 updates and 2.40 GFLOP; its held-out accuracy is 50.0%" in (
        page.write(tmp_path)
    )


def test_gaps_in_the_metrics_are_gaps_in_the_plots(tmp_path):
    spec = synthetic.stage("joint", "grpo", "base", ["a"])
    synthetic.write_plan(tmp_path, [spec], {}, None)
    synthetic.write_metrics(tmp_path, spec, 9, {"a": 1.0}, np.random.default_rng(0))
    path = tmp_path / "joint" / "metrics.jsonl"
    path.write_text(re.sub(r'"(reward|kl)": [0-9.e-]+', r'"\1": null', path.read_text()))
    records = logs.read(tmp_path)
    plots = list(training.draw(records, {"joint": "#000000"}))
    assert [plot.svg.startswith("<?xml") for plot in plots] == [True, True]


def test_names_are_escaped():
    table = tabular.Table("t", "", ["a|<b>"], [["c|<script>"]])
    page = markup.render(title="<script>", subtitle="", tables=[table])
    assert "<script>" not in page
    assert page.count("&lt;script&gt;") == 3
    assert table.markdown().count("\\|") == 2


@pytest.mark.parametrize(
    ("saving", "ci95", "expected"),
    [
        (0.25, [0.1, 0.4], "d saves 25.0% (95% interval of the saving +10.0% to +40.0%)."),
        (-0.25, [-0.4, -0.1], "d costs 25.0% more (95% interval of the saving −40.0% to −10.0%)."),
        (0.25, [-0.1, 0.4], "does not tell which is cheaper."),
        (0.25, [None, 0.4], "saving −∞ to +40.0%). The interval includes 0"),
    ],
)
def test_the_saving_in_words(saving, ci95, expected):
    shares = dict.fromkeys(("distill_share", "recovery", "saving_whole_run"))
    comparison = {"routes": ["d", "j"], "domains": ["x", "y", "z"], "target_accuracy": 0.8}
    comparison |= {"flops": {"d": 3e12, "j": 4e12}, "saving": saving, "saving_ci95": ci95}
    (sentence,) = page.summary({"comparison": comparison | shares})
    assert sentence.startswith(
        "To reach 80.0% mean held-out accuracy on x, y and z, d needs 3.00 T"
    )
    assert sentence.endswith(expected) or expected in sentence
    assert ("includes 0" in sentence) == (ci95[0] is None or ci95[0] < 0 < ci95[1])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "0.00 FLOP"),
        (312e9, "312 GFLOP"),
        (999.4e9, "999 GFLOP"),
        (999.6e9, "1.00 TFLOP"),
        (1.234e12, "1.23 TFLOP"),
        (9.996e6, "10.0 MFLOP"),
        (3.1e21, "3100 EFLOP"),
        (None, "–"),
    ],
)
def test_flops_have_three_digits_and_a_unit(value, expected):
    assert tabular.flops(value) == expected


def test_intervals_in_print():
    entry = {"mean": 0.8312, "ci95": [0.8, None]}
    assert tabular.interval(entry) == "83.1% [80.0, ∞]"
    assert tabular.interval({"mean": -0.05, "ci95": [-0.1, 0.0]}, signed=True) == (
        "−5.0% [−10.0, +0.0]"
    )
    assert tabular.interval(None) == "–"


def test_pass_at_k_is_shown_where_it_says_more_than_the_accuracy():
    entry = {"mean": 0.5, "ci95": [0.4, 0.6]}
    shown = {
        ks: tabular.pass_table({"stages": {"base": {"pass_at_k": {"a": dict.fromkeys(ks, entry)}}}})
        for ks in (("1",), ("1", "2"))
    }
    assert not shown["1",].rows
    assert shown["1", "2"].rows == [["base", "a", *["50.0% [40.0, 60.0]"] * 2]]


def test_running_mean_is_a_mean_over_neighbours():
    value_T = np.random.default_rng(0).random(11)
    expected = [value_T[max(t - 2, 0) : t + 3].mean() for t in range(11)]
    np.testing.assert_allclose(training.running_mean(value_T, 2), expected)


def test_a_report_needs_neither_jax_nor_a_display():
    code = "import sys, opd_jax.report, opd_jax.report.sweep; print(sorted(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'jax'" not in run.stdout
    assert "'matplotlib.pyplot'" not in run.stdout


def sweep_points(root):
    """Two points of three seeds and two seeds, the second with a failed and a lost run."""
    points = []
    for name, seeds in (("expert", 3), ("weak", 2)):
        for seed in range(seeds):
            workdir = root / f"{name}-{seed}"
            skill = 2.0 if name == "expert" else 1.0
            synthetic.write(workdir, problems=20, samples=2, seed=seed, merge_skill=skill)
            (workdir / "results.json").write_text(json.dumps(results.collect(workdir)))
            points.append({"name": name, "seed": seed, "workdir": str(workdir), "error": None})
    points = [point | {"status": "done"} for point in points]
    lost = {"workdir": str(root / "lost"), "error": None, "status": "done"}
    failed = {"workdir": str(root / "x"), "error": "ValueError: NaN at 3", "status": "failed"}
    return [*points, {"name": "weak", "seed": 7} | lost, {"name": "random", "seed": 0} | failed]


def test_a_sweep_ends_in_one_table(tmp_path):
    points = sweep_points(tmp_path)
    console = sweep.write_sweep(points, tmp_path / "out")
    with (tmp_path / "out" / "sweep.csv").open() as file:
        rows = {(row["name"], row["route"]): row for row in csv.DictReader(file)}
    assert set(rows) == {(n, r) for n in ("expert", "weak") for r in ("divide_and_merge", "joint")}
    runs = [results.collect(point["workdir"]) for point in points[:3]]
    merged = [run["routes"]["divide_and_merge"]["accuracy"]["mean"] for run in runs]
    row = rows["expert", "divide_and_merge"]
    assert row["seeds"] == "3"
    assert float(row["accuracy_mean"]) == pytest.approx(np.mean(merged))
    half = 4.303 * np.std(merged, ddof=1) / np.sqrt(3)
    assert float(row["accuracy_high"]) == pytest.approx(np.mean(merged) + half)
    overlaps = [o["end"] for run in runs for o in run["stages"]["merge"]["overlap"].values()]
    assert float(row["overlap_end_mean"]) == pytest.approx(np.mean(overlaps))
    savings = [run["comparison"]["saving"] for run in runs]
    assert float(row["saving_mean"]) == pytest.approx(np.mean(savings))
    assert rows["expert", "joint"]["saving_mean"] == ""
    assert rows["weak", "joint"]["seeds"] == "2"
    for text in (console, " ".join(Page((tmp_path / "out" / "sweep.html").read_text()).text)):
        assert "random, seed 0 failed: ValueError: NaN at 3" in text
        assert "weak, seed 7 failed" in text
        assert f"{np.mean(merged):.1%} ±{half:.1%}" in text


def test_a_sweep_of_which_everything_failed(tmp_path):
    point = {"name": "a", "seed": 0, "workdir": "x", "status": "failed", "error": "boom"}
    assert "a, seed 0 failed: boom" in sweep.write_sweep([point], tmp_path)


def test_a_sweep_without_routes_shows_the_last_stage(tmp_path):
    spec = synthetic.stage("base", "sft", "scratch", ["a"])
    synthetic.write_plan(tmp_path, [spec], {}, None)
    synthetic.write_eval(tmp_path, "base", 3, "a", 1e9, [[1], [0]])
    synthetic.write_result(tmp_path, spec, 3)
    page.write(tmp_path)
    point = {"name": "only", "seed": 0, "workdir": tmp_path, "status": "done", "error": None}
    assert re.search(r"only +base +1 +50\.0% +2\.40 GFLOP", sweep.write_sweep([point], tmp_path))
