"""Programs that a model wrote: what passes, what does not, and what hostile ones cannot do.

Every hostile program is a test at two levels of isolation: all walls, and the ones that an
ordinary container still has (landlock and seccomp).
"""

import datetime
import decimal
import fractions
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

from opd_jax.domains import VERIFIERS, sandbox
from opd_jax.domains.sandbox import plain, process

pytestmark = pytest.mark.usefixtures("alone")
LIMITS = sandbox.Limits(seconds=1, memory_mb=256, output_kb=64)
LEVELS = {"all": ("namespaces", "landlock", "seccomp"), "filters": ("landlock", "seccomp")}
CHILD = str(pathlib.Path(process._CHILD))
GOOD = "def add(a, b):\n    return a + b\n"
ADD = {"kind": "functions", "entry_point": "add",
       "tests": [{"args": [1, 2], "expected": 3}, {"args": [2, 5], "expected": 7}]}  # fmt: skip
ASSERTS = {"kind": "asserts", "tests": ["assert add(1, 2) == 3", "assert add(2, 5) == 7"]}
STDIO = {"kind": "stdio", "tests": [{"input": "", "output": "blocked\n"}]}


@pytest.fixture(params=["all", pytest.param("filters", marks=pytest.mark.slow)])
def level(request, monkeypatch):
    """Runs a test at a level of isolation; without it on this host the test says so."""
    walls = LEVELS[request.param]
    missing = set(walls) - set(sandbox.probe().walls)
    if missing:
        pytest.skip(f"this host does not offer {', '.join(sorted(missing))}")
    monkeypatch.setattr(process, "probe", lambda: sandbox.Isolation(walls))
    return request.param


def verdict(answer, source, limits=LIMITS):
    """ "right", "wrong", or the limit that ran out; and nothing is left behind."""
    before = folders()
    start = time.monotonic()
    try:
        result = "right" if sandbox.verify(json.dumps(answer), source, limits) else "wrong"
    except sandbox.OutOfLimits as error:
        result = str(error)
    # A busy machine stretches this clock; what it guards against would wait for ever.
    assert time.monotonic() - start < 30
    # Other tests kill whole runs, whose interpreters die a moment later; a leak would stay.
    wait_until(lambda: not survivors(), seconds=2)
    assert survivors() == []
    assert folders() == before
    return result


def survivors():
    """Processes of the sandbox that are still alive: this process's, and nobody's."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if CHILD.encode() in command and not elsewhere(int(entry.name)):
                found.append(entry.name)
    return found


def elsewhere(pid):
    """Whether another worker of the tests, which may ask what this host offers, started it."""
    while pid > 1 and pid != os.getpid():
        if pid == os.getppid():
            return True
        try:
            # The name before it may hold anything, a bracket too.
            pid = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # It, or one that it descends from, has gone meanwhile.
            return False
    return False


def folders():
    return sorted(pathlib.Path("/tmp").glob("opd_sandbox_*"))


def writer(line):
    """A program that writes a line into whatever is open, and leaves with exit code 0."""
    source = f"import os\nfor fd in range(3, 20):\n    try: os.write(fd, {line!r})\n"
    return source + "    except OSError: pass\nos._exit(0)"


def attempt(code):
    """A program that prints "blocked" if the code raises OSError, and "done" if it does not."""
    body = "\n".join("    " + line for line in code.splitlines())
    return f"try:\n{body}\nexcept OSError:\n    print('blocked')\nelse:\n    print('done')\n"


# What passes.


@pytest.mark.parametrize("answer", [ADD, ASSERTS])
def test_a_right_program_passes_and_a_wrong_one_does_not(answer, level):
    assert verdict(answer, GOOD) == "right"
    assert verdict(answer, f"Sure:\n```python\n{GOOD}```\nDone.") == "right"
    assert verdict(answer, "def add(a, b):\n    return a * b + 1\n") == "wrong"
    for source in ("", "def add(a, b)\n", "def sub(a, b): return 1", "add = 3", "1/0", "\0"):
        assert verdict(answer, source) == "wrong", source


def test_the_last_closed_fence_counts():
    assert sandbox.program("```\na\n```\ntext\n```py\nb\n```\n") == "b\n"
    assert sandbox.program("```python\na = 1\n") == "```python\na = 1\n"  # Cut: no program.
    assert sandbox.program("x = 1") == "x = 1"


@pytest.mark.parametrize(
    ("expected", "right", "wrong"),
    [
        (3, ["3", "3.0"], ["4", "'3'", "None", "[3]"]),
        (0.3, ["0.1 + 0.2", "0.3000001"], ["0.301", "'0.3'", "True", "10**400"]),
        ([1, [2]], ["[1, [2]]", "(1, (2,))"], ["[1, 2]", "{1: [2]}", "[1, [2], 3]"]),
        ({"a": 0.5}, ["{'a': 0.5}", "dict(a=1/2)"], ["{}", "{'b': 0.5}", "[('a', 0.5)]"]),
        (None, ["None"], ["0", "False", "object()"]),
        ("x", ["'x'", "type('S', (str,), {})('x')"], ["'X'", "b'x'"]),
        (2**70, ["2**70"], ["2**70 + 1", "float(2**70 + 2**60)"]),
    ],
)  # fmt: skip
def test_values_are_compared_as_data(expected, right, wrong):
    answer = {"kind": "functions", "entry_point": "f", "tests": [{"expected": expected}]}
    for value in right:
        assert verdict(answer, f"def f(): return {value}") == "right", value
    for value in wrong:
        assert verdict(answer, f"def f(): return {value}") == "wrong", value


def test_methods_and_keyword_arguments():
    source = "class Solution:\n    def add(self, a, *, b=0):\n        return a + b\n"
    tests = [{"args": [1], "kwargs": {"b": 2}, "expected": 3}, {"args": [4], "expected": 4}]
    answer = {"kind": "functions", "entry_point": "Solution.add", "tests": tests}
    assert verdict(answer, source) == "right"
    assert verdict(answer, source.replace("+", "-")) == "wrong"


def test_test_code_as_mbpp_and_humaneval_have_it():
    source = "class Pair:\n    def __init__(self, a, b): self.a = a\n"
    source += "def first(pairs): return {(p.a, 'x') for p in pairs}\ndef fail(): raise KeyError(1)"
    tests = [
        "assert first([Pair(1, 2), Pair(3, 4)]) == {(1, 'x'), (3, 'x')}",
        "try:\n    fail()\nexcept KeyError:\n    pass\nelse:\n    assert False",
    ]
    assert verdict({"kind": "asserts", "tests": tests}, source) == "right"
    check = (
        "def check(candidate):\n    for i in range(9):\n        assert candidate(i, 1) == i + 1\n"
    )
    human = {"kind": "asserts", "entry_point": "add", "tests": check}
    prompt = 'def add(a, b):\n    """Adds."""\n'
    assert verdict(human, GOOD) == "right"
    assert verdict(human | {"prefix": prompt}, "    return a + b") == "right"
    assert verdict(human | {"prefix": prompt}, "    return a - b") == "wrong"
    needs_numpy = {"kind": "asserts", "setup": "import numpy", "tests": "assert add(1, 2) == 3"}
    roomy = sandbox.Limits(seconds=5, memory_mb=2048)
    assert verdict(needs_numpy, GOOD, roomy) == "right"  # The tests may; the program may not:
    assert verdict(ASSERTS, "import numpy\n" + GOOD) == "wrong"


@pytest.mark.parametrize("write", [
    "print(a + b)", "sys.stdout.write(str(a + b))", "sys.stdout.buffer.write(b'%d' % (a + b))",
    "os.write(1, b'%d' % (a + b))", "print(a + b, end='\\r\\n\\n')", "print(a + b, ' ')",
])  # fmt: skip
@pytest.mark.parametrize("read", [
    "input()", "sys.stdin.readline()", "sys.stdin.buffer.read()", "open(0).read()",
    "sys.stdin.read()",
])  # fmt: skip
def test_r22_standard_streams_in_all_ways(read, write):
    answer = {"kind": "stdio", "tests": [{"input": "3 4\n", "output": "7\n"}]}
    source = f"import os, sys\na, b = map(int, {read}.split())\n{write}\n"
    assert verdict(answer, source) == "right"


def test_r22_outputs_that_differ_in_more_than_blanks():
    same = sandbox.same_output
    assert same("1 2\n3\n", "1 2 \r\n3", 1e-6)
    assert same("0.5\n", "0.50000001", 1e-6)
    assert same("1e-3", ".001", 1e-6)
    for expected, got in (("1 2", "1\n2"), ("5", "5.0"), ("0.5", "0.51"), ("0.5", "0.5 x"),
                          ("a", ""), ("0.5", "nan"), ("12", "1 2"), ("a", "A")):  # fmt: skip
        assert not same(expected, got, 1e-6), (expected, got)


def test_a_program_whose_main_guard_prints():
    answer = {"kind": "stdio", "tests": [{"input": "5", "output": "25"}]}
    source = "if __name__ == '__main__':\n    print(int(input()) ** 2)"
    assert verdict(answer, source) == "right"
    big = {"kind": "stdio", "tests": [{"input": "x" * 300_000, "output": "300000"}]}
    assert verdict(big, "print(len(input()))") == "right"
    assert verdict(big, "print(300000)") == "right"  # Reading is not obligatory.


# The answer is checked when it is loaded.


@pytest.mark.parametrize(("answer", "message"), [
    ("{", "not JSON"),
    ([], "'kind' must be one of"),
    ({"kind": "shell", "tests": []}, "'kind' must be one of"),
    (ADD | {"extra": 1}, "it must have 'tests'"),
    ({"kind": "stdio"}, "it must have 'tests'"),
    (ADD | {"tests": []}, "at least one test"),
    ({"kind": "functions", "tests": ADD["tests"]}, "needs 'entry_point'"),
    (ADD | {"tests": [{"args": [1]}]}, "must have"),
    (ADD | {"tests": [{"args": 1, "expected": 1}]}, "must be a list"),
    (ADD | {"tolerance": "x"}, "wrong type"),
    (STDIO | {"tests": [{"input": 1, "output": ""}]}, "must be a str"),
    (ASSERTS | {"tests": []}, "source or a list"),
    (ASSERTS | {"tests": ["assert ("]}, "test source"),
])  # fmt: skip
def test_r14_a_bad_answer_is_an_error_at_load_time(answer, message):
    text = answer if isinstance(answer, str) else json.dumps(answer)
    with pytest.raises(ValueError, match=message):
        VERIFIERS["python"].check(text)


def test_good_answers_pass_the_check():
    for answer in (ADD, ASSERTS, STDIO):
        VERIFIERS["python"].check(json.dumps(answer))


# Refusal.


def test_without_isolation_nothing_runs_unless_allowed(monkeypatch):
    monkeypatch.setattr(process, "probe", lambda: sandbox.Isolation(()))
    before = folders()
    with pytest.raises(sandbox.SandboxError, match=r"isolation of .*: none.*allow_unsandboxed"):
        sandbox.verify(json.dumps(ADD), GOOD)
    assert sandbox.verify(json.dumps(ADD), GOOD, LIMITS, allow_unsandboxed=True)
    assert folders() == before


@pytest.mark.parametrize(("walls", "enough"), [
    ((), False), (("seccomp",), False), (("namespaces", "landlock"), False),
    (("landlock", "seccomp"), True), (("namespaces", "seccomp"), True),
])  # fmt: skip
def test_what_counts_as_isolation(walls, enough):
    assert sandbox.Isolation(walls).enough == enough


def test_what_was_found_is_said():
    text = sandbox.Isolation(("landlock", "seccomp")).describe()
    assert text.endswith("landlock, seccomp (not on this host: namespaces)")


# Hostile programs. Each is wrong or out of a limit, and leaves nothing behind.


def test_r25_fork_bomb(level):
    source = "import os\nwhile True:\n    os.fork()\n"
    assert verdict(ADD, source) == "wrong"  # The first fork is refused.
    assert verdict(STDIO, attempt(source)) == "right"


def test_r25_ten_gigabytes(level):
    for source in ("x = bytearray(10**10)", "x = bytearray(10**11)", "x = [0]\nwhile 1: x += x"):
        assert verdict(ADD, f"{source}\n{GOOD}") == "wrong", source
    roomy = sandbox.Limits(seconds=1, memory_mb=1024)
    assert verdict(ADD, f"x = bytearray(10**8)\n{GOOD}", roomy) == "right"  # Control.


def test_r27_endless_print(level):
    assert verdict(STDIO, "while 1: print('x' * 10**6)") == "output"
    assert verdict(ADD, "def add(a, b): return 'x' * 10**7") == "output"
    # With functions nobody reads the output, so it takes no memory and is no reason to fail.
    assert verdict(ADD, f"print('x' * 10**6)\n{GOOD}") == "right"


def test_r27_memory_of_the_judge_stays_bounded(level):
    def peak():
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4

    before = peak()
    for _ in range(5):
        verdict(STDIO, "while 1: print('x' * 10**6)")
    assert peak() - before < 2 * LIMITS.output_kb + 4096


def test_exit_before_the_tests(level):
    for source in ("import os\nos._exit(0)", "raise SystemExit(0)", "exit(0)",
                   "def add(a, b):\n    import os\n    os._exit(0)"):  # fmt: skip
        for answer in (ADD, ASSERTS, STDIO):
            assert verdict(answer, source) == "wrong", source


def test_r20_writing_the_verdict(level):
    for source in (
        "print('ALL_TESTS_PASSED')\nopen('reward.txt', 'w').write('1.0')",
        writer(b'{"passed": true, "text": ""}\n'),
        writer(b'{"value": true}\n'),
        writer(b"true\n"),
        "import sys\nsys.modules['__main__'].Server._answer = lambda *a: {'passed': 1}\n" + GOOD,
    ):
        for answer in (ADD, ASSERTS):
            assert verdict(answer, source) == "wrong", source


def test_r28_reading_the_parents_memory_and_environment(level, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "4711")
    environment = "import os\nprint('blocked' if 'SECRET_TOKEN' not in os.environ else 1)"
    assert verdict(STDIO, environment) == "right"
    for path in ("'/proc/%d/environ' % os.getppid()", "'/proc/%d/mem' % os.getppid()",
                 "'/proc/1/environ'", "'/proc/self/environ'",
                 f"'/proc/{os.getpid()}/environ'"):  # fmt: skip
        assert verdict(STDIO, attempt(f"import os\nopen({path}, 'rb').read(10)")) == "right", path
    reader = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"n = libc.syscall(310, {os.getpid()}, None, 0, None, 0, 0)\n"
        f"m = libc.ptrace(16, {os.getpid()}, None, None)\n"
        "print('blocked' if n < 0 and m < 0 else 'done')"
    )
    assert verdict(STDIO, reader) == "right"


def test_r28_opening_a_socket(level):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for code in (f"socket.create_connection(('127.0.0.1', {port}))", "socket.socket()",
                     "socket.socket(socket.AF_UNIX)", "socket.socket(socket.AF_NETLINK)",
                     "socket.socketpair(type=socket.SOCK_DGRAM)"):  # fmt: skip
            assert verdict(STDIO, attempt(f"import socket\n{code}")) == "right", code
    # An event loop needs a pair of connected streams, which lead nowhere.
    code = "import asyncio\nasync def f(): return 'blocked'\nprint(asyncio.run(f()))"
    assert verdict(STDIO, code) == "right"


def test_r28_files_outside_its_folder(level, tmp_path):
    (tmp_path / "secret").write_text("4711")
    for code in (f"open('{tmp_path}/secret').read()", f"open('{tmp_path}/new', 'w')",
                 "open('/etc/passwd').read()", "open('/new', 'w')", "os.listdir('/root')",
                 f"os.remove('{tmp_path}/secret')", f"os.listdir('{os.path.dirname(__file__)}')",
                 "open(os.__file__, 'a')", "open('/usr/lib/new', 'w')"):  # fmt: skip
        assert verdict(STDIO, attempt(f"import os\n{code}")) == "right", code
    assert (tmp_path / "secret").read_text() == "4711"
    # Its own folder it may use, up to a limit.
    code = "open('x', 'w').write('blocked')\nprint(open('x').read())"
    assert verdict(STDIO, code) == "right"
    assert verdict(STDIO, attempt("open('x', 'wb').write(bytes(10**8))")) in ("right", "wrong")


def test_r28_killing_its_parent(level):
    for code in ("os.kill(os.getppid(), 9)", f"os.kill({os.getpid()}, 9)", "os.kill(-1, 9)",
                 "os.killpg(0, 9)", "os.kill(1, 9)"):  # fmt: skip
        assert verdict(STDIO, attempt(f"import os\n{code}")) == "right", code


def test_r26_a_child_that_outlives_it(level):
    for code in (
        "import subprocess\nsubprocess.Popen(['sleep', '600'])",
        "import os\nif os.fork() == 0:\n    os.setsid()\n    os.execv('/bin/sleep', ['', '9'])",
        "import multiprocessing\nmultiprocessing.Process(target=print).start()",
        "import os\nos.posix_spawn('/bin/sleep', ['sleep', '600'], {})",
        "import os\nos.execv('/bin/sleep', ['sleep', '600'])",
    ):
        assert verdict(STDIO, attempt(code)) == "right", code


def test_r26_endless_loops_and_sleepers(level):
    assert verdict(ADD, "while True: pass") == "CPU time"
    assert verdict(ADD, "def add(a, b):\n    while True: pass") == "CPU time"
    assert verdict(ADD, "import time\ntime.sleep(600)") == "time by the clock"
    closed = "import os, time\nos.close(0); os.close(1); os.close(2)\ntime.sleep(600)"
    assert verdict(STDIO, closed) == "wrong"  # Its output has ended, so nobody waits for it.
    threads = "import threading, time\nfor _ in range(3):\n"
    threads += "    threading.Thread(target=time.sleep, args=(600,)).start()\n"
    roomy = sandbox.Limits(seconds=1, memory_mb=1024)
    assert verdict(ADD, threads + GOOD, roomy) == "right"


def test_a_limit_that_the_program_cannot_lift(level):
    raised = "import resource, signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
    raised += "try: resource.setrlimit(resource.RLIMIT_CPU, (99, 99))\nexcept Exception: pass\n"
    assert verdict(ADD, raised + "while True: pass") == "CPU time"


def test_an_integer_of_a_billion_digits(level):
    limit = ("CPU time", "time by the clock", "wrong", "output")
    assert verdict(ADD, "def add(a, b): return 10**(10**9)") in limit
    assert verdict(ADD, "def add(a, b): return 1 << 10**9") in limit
    assert verdict(STDIO, "print(10**(10**9))") in limit
    # A large one that is meant is exact.
    answer = {"kind": "functions", "entry_point": "f", "tests": [{"expected": 10**3000}]}
    assert verdict(answer, "def f(): return 10**3000") == "right"
    assert verdict(answer, "def f(): return 10**3000 + 1") == "wrong"


def test_catastrophic_regex(level):
    source = "import re\ndef add(a, b): return re.match('(a+)+$', 'a' * 50 + 'b')"
    assert verdict(ADD, source) == "CPU time"


def test_deep_recursion(level):
    deep = "import sys\nsys.setrecursionlimit(10**9)\n"
    for source in (
        deep + "def add(a, b): return add(a, b)",
        deep + "def f(): return f()\nf()",
        "def add(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
        "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
        "import os\nos.write(3, b'[' * 10**5 + b'\\n')\n" + "eval('[' * 10**5)",
    ):
        assert verdict(ADD, source) not in ("right",), source


def test_a_hostile_reply_is_only_data(level):
    deep = "[" * 5000 + "]" * 5000
    for reply in ("[" * 50_000, f'{{"value": {deep}}}', '{"value": {"int": 1}}',
                  '{"value": {"fraction": "1/0"}}', '{"value": {"object": 0}}', "3", "null", "{}",
                  '{"value": {"decimal": "x"}}', '{"value": ' + "1" * 5000 + "}", '{"value": NaN}',
                  '{"error": 5, "text": 5}', '{"value": {"set": [[]]}}'):  # fmt: skip
        for answer in (ADD, ASSERTS):
            assert verdict(answer, writer(reply.encode() + b"\n")) == "wrong", reply


def test_reading_tests_off_the_stack(level):
    """The expected values are nowhere in the process, so looking for them finds nothing."""
    source = """
import gc, sys
def f(x, *more):
    todo, frame = gc.get_objects(), sys._getframe()
    while frame:
        todo += [frame, frame.f_locals, *frame.f_locals.values()]
        frame = frame.f_back
    found = [y for z in todo for y in gc.get_referents(z) if type(y) is int]
    found = [y for y in found if 918 * 10**6 < y < 919 * 10**6]
    return found[0] if found else 0
"""
    limits, secret = sandbox.Limits(seconds=4), 918273645
    for args, result in (([1], "wrong"), ([1, secret], "right")):  # The second is the control.
        test = {"args": args, "expected": secret}
        answer = {"kind": "functions", "entry_point": "f", "tests": [test]}
        call = ", ".join(map(str, args))
        asserts = {"kind": "asserts", "tests": [f"assert f({call}) == {secret}"]}
        assert verdict(answer, source, limits) == result
        assert verdict(asserts, source, limits) == result


PATCHES = [
    """
class Any:
    __hash__ = None
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
def add(a, b): return Any()
""",
    """
class One(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def add(a, b): return One(0)
""",
    """
import builtins
builtins.AssertionError = type("E", (Exception,), {})
builtins.all = builtins.any = lambda *a: True
def add(a, b): return 0
""",
    """
import json
json.dumps = lambda *a: '{"passed": true}'
def add(a, b): return 0
""",
    "import sys\nsys.settrace(lambda *a: None)\ndef add(a, b): return 0",
    "def add(a, b): raise SystemExit(0)",
    "def add(a, b): raise AssertionError",
]


@pytest.mark.parametrize("source", PATCHES)
def test_patching_assert_and_equality(source, level):
    assert verdict(ADD, source) == "wrong"
    assert verdict(ASSERTS, source) == "wrong"


def test_what_the_same_attempts_do_without_walls(monkeypatch, tmp_path):
    """The negative control of the whole file: unprotected, they succeed."""
    monkeypatch.setattr(process, "probe", lambda: sandbox.Isolation(()))
    file = tmp_path / "new"
    for code in ("import socket\nsocket.socket()", f"open('{file}', 'w')", "import os\nos.fork()",
                 "open('/proc/1/cmdline')"):  # fmt: skip
        try:
            blocked = sandbox.verify(json.dumps(STDIO), attempt(code), LIMITS, True)
        except sandbox.OutOfLimits:
            blocked = False
        assert not blocked, code
    assert file.exists()


@pytest.mark.parametrize("wall", ["namespaces", "landlock", "seccomp"])
def test_each_wall_alone_keeps_something_out(wall, monkeypatch):
    if wall not in sandbox.probe().walls:
        pytest.skip(f"this host does not offer {wall}")
    monkeypatch.setattr(process, "probe", lambda: sandbox.Isolation((wall,)))
    code = {"namespaces": "open('/etc/passwd')", "landlock": "open('/etc/passwd')",
            "seccomp": "import socket\nsocket.socket()"}[wall]  # fmt: skip
    assert sandbox.verify(json.dumps(STDIO), attempt(code), LIMITS, True)


def wait_until(condition, seconds=60):
    """For what a busy machine only delays."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def test_the_interpreter_dies_with_its_supervisor():
    code = (
        "import json, sys; sys.path.insert(0, '.')\n"
        "from opd_jax.domains import sandbox\n"
        "a = {'kind': 'functions', 'entry_point': 'f', 'tests': [{'expected': 1}]}\n"
        "sandbox.verify(json.dumps(a), 'import time\\ntime.sleep(600)')"
    )
    parent = subprocess.Popen([sys.executable, "-c", code],
                              cwd=pathlib.Path(__file__).parent.parent)  # fmt: skip
    wait_until(survivors)
    assert survivors()  # Whether the probe or the program, at whatever point of its start.
    parent.kill()
    parent.wait()
    wait_until(lambda: not survivors())
    assert survivors() == []


def test_an_interpreter_whose_supervisor_is_gone_runs_nothing(level, monkeypatch):
    def answer():
        budget = process.Budget(LIMITS, process.probe())
        with budget.start("probe") as run:
            return run.read_line()

    assert answer() == b"ready\n"
    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setattr(process.os, "getpid", lambda: gone.pid)
    assert answer() == b""


# Plain data.


def roundtrip(value):
    kept = []
    text = json.dumps(plain.encode(value, lambda x: kept.append(x) or len(kept) - 1))
    return plain.decode(plain.loads(text.encode()), plain.Remote)


def test_plain_data_survives_and_nothing_else():
    for value in (None, True, 3, -(2**80), 1.5, "ä\ud800", b"\0x", 1 + 2j, [1, (2, {3})],
                  {1: {"a"}},
                  {(1, 2): [None]}, frozenset({1}), range(3), decimal.Decimal("1.50"),
                  fractions.Fraction(1, 3), datetime.date(2020, 1, 2), datetime.timedelta(1, 2),
                  datetime.datetime(2020, 1, 2, 3), float("inf")):  # fmt: skip
        got = roundtrip(value)
        assert type(got) is type(value)
        assert got == value
    remote = roundtrip(object())
    with pytest.raises(TypeError, match="compared"):
        assert remote == remote
    with pytest.raises(TypeError, match="no value"):
        bool(remote)
