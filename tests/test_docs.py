"""The pages in docs/: their examples, run one after the other as a reader would."""

import pathlib
import re

import pytest

from opd_jax import domains

DOCS = pathlib.Path(__file__).parent.parent / "docs"
# Page -> how many examples it has, so that none is lost to a changed fence.
PAGES = {
    "bring_your_own_problems.md": 5,
    "bring_your_own_verifier.md": 3,
    "bring_your_own_model.md": 3,
    "launch.md": 0,  # Commands: tests/test_launch.py.
    "tpu_pods.md": 0,  # Commands: tests/test_aot.py.
}


def test_every_page_is_run():
    assert {path.name for path in DOCS.glob("*.md")} == set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(domains, "VERIFIERS", dict(domains.VERIFIERS))
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert len(blocks) == PAGES[page]
    names = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
