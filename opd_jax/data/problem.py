"""Problem: one question that a machine can mark."""

import dataclasses
from collections.abc import Mapping

SPLITS = ("train", "validation", "test")


@dataclasses.dataclass(frozen=True)
class Problem:
    """One question, what its verifier needs, and reference solutions if there are any.

    Attributes:
      domain: the name it was loaded under, e.g. "arithmetic" or "jsonl:mine.jsonl".
      id: uint32, stable between runs and unique within the domain; keys its sampling noise.
      level: difficulty, 1 is the easiest.
      prompt: what the model reads; the completion follows it without a separator.
      answer: what the verifier needs: a plain answer or JSON. Never shown to the model.
      solutions: style -> a whole completion that verifies; empty if none is known.
      verifier: name of the verifier; None stands for the domain's own.
    """

    domain: str
    id: int
    level: int
    prompt: str
    answer: str
    solutions: Mapping[str, str]
    verifier: str | None = None
