"""docs/bring_your_own_problems.md: its examples, run one after the other."""

import pathlib
import re

DOCS = pathlib.Path(__file__).parent.parent / "docs"


def test_the_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "bring_your_own_problems.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 5
    names = {}
    for block in blocks:
        exec(compile(block, "bring_your_own_problems.md", "exec"), names)
