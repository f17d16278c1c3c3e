"""How a teacher reads a problem: by a chat template of its own, or the student's prompt as it is.

OPD asks a teacher what it thinks of the student's completion. Its answer is worth most behind the
prompt that it was trained to read, so that what differs is what the two know and not how they were
asked. The completion's tokens are the student's either way; only what stands before them changes.

    hf: teacher, nothing declared    by its folder's template, with the experiment's system message
                                     and thinking switch; in an experiment with bare prompts and
                                     without a template there, bare too, with its own bos
    any other, nothing declared      the student's prompts
    stage.teacher_chat[domain]       as that says; its system message may tell the teacher more than
                                     the student is told
"""

import dataclasses

from opd_jax.config import ChatSettings, Experiment, Stage
from opd_jax.data import templates
from opd_jax.data import tokenizer as tokenizers
from opd_jax.data.tokenizer import Tokenizer
from opd_jax.teachers import parse

STUDENT = "student"  # In place of a template: the student's prompts, token for token.


def settings(x: Experiment, stage: Stage, domain: str) -> ChatSettings:
    """How the prompts of a domain's teacher are laid out, declared or not."""
    if domain in stage.teacher_chat:
        return stage.teacher_chat[domain]
    source = parse(stage.teachers[domain], f"teachers.{domain}")
    if source.kind == "hf" and templates.find(source.name) is not None:
        return dataclasses.replace(x.chat, template="own")
    if source.kind == "hf" and not x.chat.template:
        return ChatSettings()
    return ChatSettings(template=STUDENT)


def reader(x: Experiment, stage: Stage, domain: str, student: Tokenizer) -> Tokenizer:
    """The tokenizer that lays out the prompts of a domain's teacher.

    Args:
      x: the experiment.
      stage: the stage.
      domain: one that has a teacher.
      student: lays out the student's prompts; returned where the teacher reads these.

    Raises:
      ValueError: there is no such template, or it cannot serve; names the field and the remedy.
    """
    chat = settings(x, stage, domain)
    if chat.template == STUDENT:
        return student
    source = parse(stage.teachers[domain], f"teachers.{domain}")
    folder = source.name if source.kind == "hf" else x.tokenizer
    tokenizer = tokenizers.load(folder)
    if not chat.template:
        return tokenizer
    try:
        template = templates.read(folder if chat.template == "own" else chat.template)
        return templates.ChatTokenizer(tokenizer, template, chat)
    except ValueError as error:
        raise ValueError(
            f"teacher_chat.{domain}: {error}; name another template, or let the teacher read the "
            f"student's prompts: teacher_chat={{'{domain}': {{'template': '{STUDENT}'}}}}"
        ) from error
