"""What runs in the sandbox's processes: the untrusted program, or the tests that judge it.

Started by path in a fresh interpreter without site-packages or environment. Standard input holds
8 hexadecimal digits, a JSON header of that many bytes, and then what the role reads:

- role "script": the program is `__main__`; the rest of standard input is its input.
- role "functions": one call per line in, one result per line out. The program knows the arguments
  of the present call and of those before it, never what is expected.
- role "tests": runs trusted test code whose calls of the program go out as lines and come back as
  plain values; the last line out is the verdict.
- role "probe": puts up the walls and says so.

Nothing here is worth protecting from the program: it shares the interpreter of "functions" and can
write any line it likes, which is no more than its functions could return.
"""

import builtins
import io
import json
import os
import sys
import types

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import isolation
import plain

del sys.path[0]


def main() -> None:
    """Reads the header, shuts itself in, plays its role."""
    size = int(_read_exactly(8), 16)
    header = json.loads(_read_exactly(size))
    if not header["site_packages"]:
        sys.path[:] = [p for p in sys.path if not p.endswith("site-packages")]
    isolation.enter(header["walls"], header["limits"], header["folder"], header["supervisor"])
    if header["role"] == "script":
        run_script(header["source"])
    elif header["role"] == "functions":
        Server(*_take_channel()).run(header["source"])
    elif header["role"] == "tests":
        Judge(*_take_channel()).run(header)
    else:
        os.write(1, b"ready\n")


def _read_exactly(size: int) -> bytes:
    """From the file descriptor itself, so that sys.stdin has not read ahead."""
    parts = b""
    while len(parts) < size:
        part = os.read(0, size - len(parts))
        if not part:
            os._exit(1)
        parts += part
    return parts


def _take_channel() -> tuple[io.BufferedReader, io.BufferedWriter]:
    """Moves the channel away from standard input and output, where programs read and print."""
    inward, outward = os.dup(0), os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    return os.fdopen(inward, "rb"), os.fdopen(outward, "wb")


def new_module(name: str) -> types.ModuleType:
    """An empty module that imports and dataclasses find by name."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module


def run_script(source: str) -> None:
    """The program as `python program.py` would run it."""
    module = new_module("__main__")
    sys.argv = ["program.py"]
    exec(compile(source, "program.py", "exec"), module.__dict__)


class Server:
    """Answers calls of the program's functions."""

    def __init__(self, inward: io.BufferedReader, outward: io.BufferedWriter):
        """Args: inward: calls. outward: results."""
        self.inward, self.outward = inward, outward
        self.objects: list[object] = []

    def run(self, source: str) -> None:
        """Loads the program, then serves until the calls end."""
        module = new_module("program")
        exec(compile(source, "program.py", "exec"), module.__dict__)
        for line in self.inward:
            self._write(self._answer(module, json.loads(line)))

    def _answer(self, module: types.ModuleType, call: dict) -> dict:
        try:
            args = plain.decode(call["args"], self.objects.__getitem__)
            kwargs = plain.decode(call["kwargs"], self.objects.__getitem__)
            function = module
            for name in call["name"].split("."):
                # Solution.add: a method of a new object.
                owner = function() if isinstance(function, type) else function
                function = getattr(owner, name)
            if call["read"] and not callable(function):
                return {"value": plain.encode(function, self._refer)}
            if call["read"]:
                return {"callable": True}
            return {"value": plain.encode(function(*args, **kwargs), self._refer)}
        except BaseException as error:
            return {"error": type(error).__name__, "text": _text(error)}

    def _refer(self, value: object) -> int:
        self.objects.append(value)
        return len(self.objects) - 1

    def _write(self, answer: dict) -> None:
        self.outward.write(json.dumps(answer).encode() + b"\n")
        self.outward.flush()


class Judge:
    """Runs test code; the program's names in it are calls into another process."""

    def __init__(self, inward: io.BufferedReader, outward: io.BufferedWriter):
        """Args: inward: results of the program. outward: calls, at last the verdict."""
        self.inward, self.outward = inward, outward

    def run(self, header: dict) -> None:
        """Sends {"passed": true} if no test raises, else what was raised."""
        import ast
        import random

        random.seed(0)
        module = new_module("tests")
        sources = [header["setup"], *header["tests"]]
        if header["entry_point"]:
            sources.append(f"check({header['entry_point']})")
        try:
            trees = [ast.parse(source) for source in sources]
            for name in free_names(trees):
                setattr(module, name, self._look_up(name))
            for tree in trees:
                exec(compile(tree, "tests", "exec"), module.__dict__)
        except BaseException as error:
            self._write({"passed": False, "text": f"{type(error).__name__}: {_text(error)}"})
        else:
            self._write({"passed": True, "text": ""})

    def _look_up(self, name: str):
        """A value of the program, or a function that calls the program's of that name."""
        answer = self._ask({"name": name, "args": [], "kwargs": {"dict": []}, "read": True})
        if isinstance(answer, dict) and answer == {"callable": True}:
            return lambda *args, **kwargs: self._call(name, args, kwargs)
        return self._value(answer)

    def _call(self, name: str, args: tuple, kwargs: dict):
        packed = plain.encode(list(args), _refuse), plain.encode(kwargs, _refuse)
        return self._value(
            self._ask({"name": name, "args": packed[0], "kwargs": packed[1], "read": False})
        )

    def _ask(self, call: dict):
        self._write({"call": call})
        return plain.loads(self.inward.readline())

    def _value(self, answer: object):
        if not isinstance(answer, dict):
            raise ValueError("the program sent no answer")
        if "value" in answer:
            return plain.decode(answer["value"], plain.Remote)
        kind = vars(builtins).get(answer["error"]) if isinstance(answer["error"], str) else None
        known = isinstance(kind, type) and issubclass(kind, Exception)
        # AssertionError is the tests' own word for a failure; the program's would look like one.
        raise (kind if known else RuntimeError)(str(answer["text"]))

    def _write(self, message: dict) -> None:
        self.outward.write(json.dumps(message).encode() + b"\n")
        self.outward.flush()


def free_names(trees: list) -> list[str]:
    """Names that these syntax trees read and nowhere bind: the program's."""
    import ast  # Only here: the other roles start twice as fast without.

    read, bound = set(), set(dir(builtins)) | {"__name__"}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                bound.add(node.name)
            elif isinstance(node, ast.arg):
                bound.add(node.arg)
            elif isinstance(node, ast.alias):
                bound.add((node.asname or node.name).split(".")[0])
            elif isinstance(node, ast.ExceptHandler) and node.name:
                bound.add(node.name)
    return sorted(read - bound)


def _refuse(value: object) -> int:
    raise TypeError(f"a test passes a {type(value).__name__}, which is not plain data")


def _text(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except BaseException:
        return ""


if __name__ == "__main__":
    main()
