"""The layers: imports only go downwards, and a few things live in one place only."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent

# From the bottom to the top; modules of one layer may import each other, but in no circle.
LAYERS = (
    ("core",),
    ("objectives", "models", "data"),
    ("domains",),
    ("scoring", "repetition"),
    ("choice",),
    ("rollout", "rewards"),
    ("ledger", "losses", "optim", "config"),
    ("steps",),
    ("algorithms",),
    ("evaluate",),
    ("infra",),
    ("train", "teachers", "teacher_prompts", "vocabulary", "guards"),
    ("pipeline", "report"),
    ("points", "main", "sweep"),
)
# Some may import less than what is below them.
ONLY = {
    "objectives": {"core"},
    "models": {"core"},
    "data": {"core"},
    "infra": {"core"},
    "report": {"ledger"},
}
LINEN, ORBAX = ("flax.linen", "flax.nnx"), ("orbax",)


def package_of(path):
    """`opd_jax/core/rng.py` is of "core", `opd_jax/steps.py` of "steps"."""
    return path.split("/")[1].removesuffix(".py")


def imported(tree):
    """Every module that a source names in an import, whole: "opd_jax.core.rng"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "write imports in full"
            # `from opd_jax.core import rng` names a module, `from flax import linen` too.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_jit(node):
    """jax.jit itself, however it is called or used as a decorator."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "jax" and any(a.name in ("jit", "pmap") for a in node.names)
    return (
        isinstance(node, ast.Attribute)
        and node.attr in ("jit", "pmap", "pjit")
        and isinstance(node.value, ast.Name)
        and node.value.id in ("jax", "nn")
    )


def has_default_lookup(node):
    """`x.get(...)`, or `getattr` with a default: a misspelt field would pass in silence."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute):
        return node.func.attr == "get"
    return isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) > 2


def violations(path, source):
    """What a file does that its place does not allow, one sentence each."""
    tree, package = ast.parse(source), package_of(path)
    rank = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    own = path.startswith("opd_jax/") and path != "opd_jax/__init__.py"
    if own and package not in rank:
        yield f"{package} stands in no layer"
        return
    names = list(imported(tree))
    for name in names:
        if own and name.startswith("opd_jax."):
            other = name.split(".")[1]
            if other != package and rank[other] > rank[package]:
                yield f"imports {other}, which is above {package}"
            if package in ONLY and other not in {package, *ONLY[package]}:
                yield f"imports {other}; {package} imports {', '.join(ONLY[package])} only"
        if name.startswith(LINEN) and package != "models":
            yield f"imports {name} outside of models"
        if name.startswith(ORBAX) and path != "opd_jax/infra/checkpoint.py":
            yield f"imports {name} outside of infra/checkpoint.py"
    nodes = list(ast.walk(tree))
    if path != "opd_jax/steps.py" and any(map(is_jit, nodes)):
        yield "compiles outside of steps.py"
    knows_configs = path.startswith("configs/") or path == "opd_jax/config.py"
    knows_configs |= any(name.startswith("opd_jax.config") for name in names)
    if knows_configs and any(map(has_default_lookup, nodes)):
        yield "looks something up with a default beside configs"


def sources():
    paths = [*(ROOT / "opd_jax").rglob("*.py"), *(ROOT / "configs").rglob("*.py")]
    return sorted(str(path.relative_to(ROOT)) for path in paths)


@pytest.mark.parametrize("path", sources())
def test_a_file_keeps_to_its_layer(path):
    assert list(violations(path, (ROOT / path).read_text())) == []


def test_no_two_modules_of_a_layer_import_each_other():
    edges = {}
    for path in sources():
        if path.startswith("opd_jax/"):
            names = imported(ast.parse((ROOT / path).read_text()))
            others = {name.split(".")[1] for name in names if name.startswith("opd_jax.")}
            edges.setdefault(package_of(path), set()).update(others - {package_of(path)})
    circles = [(a, b) for a in edges for b in edges[a] if b in edges and a in edges[b]]
    assert circles == []


@pytest.mark.parametrize(
    ("path", "source", "found"),
    [
        ("opd_jax/steps.py", "from opd_jax import train", "imports train, which is above steps"),
        ("opd_jax/core/rng.py", "import opd_jax.rollout", "imports rollout, which is above core"),
        ("opd_jax/core/rng.py", "from opd_jax.models.config import ModelConfig", "imports models"),
        ("opd_jax/report/page.py", "from opd_jax.infra import writer", "imports infra; report"),
        ("opd_jax/infra/writer.py", "from opd_jax import ledger", "imports ledger; infra"),
        ("opd_jax/objectives/opd.py", "from opd_jax.data import prompts", "objectives imports"),
        ("opd_jax/made_up.py", "", "made_up stands in no layer"),
        ("opd_jax/rollout.py", "from flax import linen as nn", "imports flax.linen outside"),
        ("opd_jax/train.py", "import orbax.checkpoint", "imports orbax.checkpoint outside"),
        ("opd_jax/train.py", "def f():\n    from orbax import checkpoint", "imports orbax."),
        ("opd_jax/rollout.py", "import jax\n@jax.jit\ndef f(x): ...", "compiles outside"),
        ("opd_jax/rollout.py", "import functools, jax\nf = functools.partial(jax.jit)", "compiles"),
        ("opd_jax/rollout.py", "from jax import jit", "compiles outside"),
        ("opd_jax/train.py", "from opd_jax.config import Stage\nStage.get('a')", "a default"),
        ("opd_jax/config.py", "def f(c): return getattr(c, 'steps', 1)", "a default"),
        ("configs/made_up.py", "def f(c): return c.get('steps')", "a default"),
    ],
)
def test_what_is_not_allowed_is_found(path, source, found):
    """Negative controls, on made-up sources."""
    assert any(found in violation for violation in violations(path, source))


def test_what_is_allowed_is_not_found():
    source = """
import jax
from opd_jax import steps, train
from opd_jax.infra.checkpoint import Checkpointer
def f(x, name):
    return jax.grad(x)(getattr(x, name)), {}.items()
"""
    assert list(violations("opd_jax/pipeline.py", source)) == []
    assert list(violations("opd_jax/steps.py", "import jax\nf = jax.jit(g)")) == []
    assert list(violations("opd_jax/models/x.py", "from flax import linen")) == []
