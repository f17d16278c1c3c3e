"""What a student and its teachers must have in common: tokens, where they stop, what they can read.

Ids mean the same in both, by the tokens' texts (`tokenizer.align`). One vocabulary may be longer
than the other, and a table longer than its vocabulary (Qwen: 151,665 tokens in 151,936 or 152,064
rows): `shared_tokens` says how much counts, and ModelConfig.of_tokens makes it so in all models.
"""

from collections.abc import Sequence

from opd_jax.config import Stage
from opd_jax.data import prompts as prompt_data
from opd_jax.data import templates
from opd_jax.data import tokenizer as tokenizers
from opd_jax.data.problem import Problem
from opd_jax.models import hf
from opd_jax.teachers import parse


def check_folder(
    folder: str,
    tokenizer: tokenizers.Tokenizer,
    teaches: bool,
    stop_token_classes: Sequence[Sequence[int]],
) -> None:
    """The tokens of a Hugging Face folder against the student's.

    Args:
      folder: of an initial model or a teacher.
      tokenizer: the student's.
      teaches: a teacher may have more or fewer tokens, but must stop where the student does.
      stop_token_classes: tokens that count as one in the stage.

    Raises:
      ValueError: shows the first tokens, or the stop tokens, that differ.
    """
    other = tokenizers.load(folder)
    if not teaches:
        if difference := tokenizers.first_difference(tokenizer, other):
            raise ValueError(f"its tokenizer differs from the experiment's: {difference}")
        return
    tokenizers.align(tokenizer, other)
    stops, says = list(other.stop_ids), ""
    template = templates.find(folder)
    end = None if template is None else templates.end_of_turn(other, template)
    if end is not None and end not in stops:
        # Its configs do not tell, but so it was taught, and so it ends also without the template.
        stops.append(end)
        says = f" ({end}, {other.pieces([end])[0]!r}, by the chat template {template.where} alone)"
    theirs, ours = (set(joined(ids, stop_token_classes)) for ids in (stops, tokenizer.stop_ids))
    if theirs != ours:
        both = tuple(dict.fromkeys((*tokenizer.stop_ids, *stops)))
        raise ValueError(
            f"the teacher stops at tokens {sorted(stops)}{says}, the student at "
            f"{sorted(tokenizer.stop_ids)}: a teacher that never rewards the student's stop makes "
            "completions grow without end; if they mean the same, say so with "
            f"opd.stop_token_classes=({both},), or give both the same eos_token_id in "
            "generation_config.json"
        )


def check_reader(
    field: str,
    reader: tokenizers.Tokenizer,
    tokenizer: tokenizers.Tokenizer,
    stop_token_classes: Sequence[Sequence[int]],
) -> None:
    """A teacher that reads by a template must end its turn where the student stops.

    Args:
      field: the teacher's path in the config.
      reader: lays out the teacher's prompts.
      tokenizer: the student's.
      stop_token_classes: tokens that count as one in the stage.

    Raises:
      ValueError: names the template, its token and what to declare.
    """
    if not isinstance(reader, templates.ChatTokenizer):
        return
    end, ours = reader.stop_ids[0], tokenizer.stop_ids
    if not set(joined([end], stop_token_classes)) <= set(joined(ours, stop_token_classes)):
        raise ValueError(
            f"{field}: the chat template {reader.where} ends a turn with {end} "
            f"({reader.pieces([end])[0]!r}), the student stops at {sorted(ours)}: the teacher "
            "would never reward that; if they mean the same, say so with "
            f"opd.stop_token_classes=({(ours[0], end)},)"
        )


def shared_tokens(s: Stage, tokenizer: tokenizers.Tokenizer) -> int:
    """Width of the vocabulary that the student and all teachers of a stage have in common.

    Ids from there on are padding in one table or the other, or tokens that one of the models never
    saw. In the stage they have no probability under any of its models: the sampler does not draw
    them, and every log-prob and divergence is of the distributions conditioned on the tokens below.
    What mass the student gives to tokens that only it has is neither rewarded nor punished; the
    teacher's is never counted against the student.

    Raises:
      ValueError: see `tokenizers.align`; or a class of stop tokens has one that is not shared.
    """
    shared = tokenizer.vocab_size
    for domain, spec in s.teachers.items():
        source = parse(spec, f"teachers.{domain}")
        if source.kind == "hf":
            rows = hf.read_config(source.name).vocab_size
            common = tokenizers.align(tokenizer, tokenizers.load(source.name))
            shared = min(shared, common, rows)
    beyond = [i for ids in s.opd.stop_token_classes for i in ids if i >= shared]
    if beyond and shared < tokenizer.vocab_size:
        raise ValueError(
            f"opd.stop_token_classes={s.opd.stop_token_classes}: the teacher's vocabulary ends at "
            f"{shared} and has no token {beyond}; leave them out"
        )
    return shared


def check_readable(
    problems: Sequence[Problem], tokenizer: tokenizers.Tokenizer, shared: int, field: str
) -> None:
    """A teacher that reads the student's prompts must have all of their tokens.

    Raises:
      ValueError: names the first problem and token that it lacks.
    """
    if shared == tokenizer.vocab_size:
        return
    for problem in problems:
        ids = prompt_data.prompt_tokens(problem, tokenizer)
        if max(ids) >= shared:
            raise ValueError(
                f"{field}: the prompt of problem {problem.id} of {problem.domain!r} has token "
                f"{max(ids)} ({tokenizer.pieces([max(ids)])[0]!r}), the teacher's vocabulary ends "
                f"at {shared}; give the teacher a template of its own in teacher_chat"
            )


def joined(ids: Sequence[int], classes: Sequence[Sequence[int]]) -> list[int]:
    """Each token of a class as the class's first."""
    first = {token: token for token in ids}
    first |= {token: members[0] for members in classes for token in members}
    return [first[token] for token in ids]
