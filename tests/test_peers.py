"""experiments/peers: what is counted, and what the table says; no other library is needed."""

import sys

from experiments.peers import compare


def once(library, grpo, opd, peak, **more):
    return {"library": library, "grpo": grpo, "opd": opd, "peak_bytes": peak << 30} | more


def test_medians_over_all_rounds_and_ratios_to_ours():
    rounds = {
        "opd_jax": [
            once("ours", [2.0], [4.0], 1, gflops=100),
            once("ours", [2.0], [2.0], 2, gflops=120),
        ],
        "x": [once("X 1", [3.0, 5.0, 9.0], [], 3)],
    }
    lines = compare.table(rounds).splitlines()
    assert (
        lines[2]
        == "| ours | 2.00 s (2.00 to 2.00), 1.00x | 3.00 s (2.00 to 4.00), 1.00x | 2.00 GiB |"
    )
    assert lines[3] == "| X 1 | 5.00 s (3.00 to 9.00), 2.50x | none | 3.00 GiB |"
    assert lines[-1] == "matmul peak 100 to 120 GFLOP/s"


def test_the_first_step_of_a_process_does_not_count(tmp_path):
    script = tmp_path / "peer.py"
    script.write_text(
        "import json, sys\n"
        "work, algorithm, steps = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])\n"
        "print('noise')\n"
        "print(json.dumps({'library': work['name'], 'peak_bytes': len(algorithm),\n"
        "                  'step_s': [9.0] + [1.0] * steps if algorithm == 'grpo' else []}))\n"
    )
    found = compare.theirs(sys.executable, str(script), {"name": "X"}, 2)
    assert found == {"library": "X", "grpo": [1.0, 1.0], "opd": [], "peak_bytes": 4}
