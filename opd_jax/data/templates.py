"""Chat templates: from a problem's text to what an instruction-tuned model reads.

    tokenizer = load("models/Qwen3-0.6B")
    chat = ChatTokenizer(tokenizer, read("models/Qwen3-0.6B"), ChatOptions(thinking="off"))
    chat.encode_prompt("What is 6*7?")   # <|im_start|>user ... <|im_start|>assistant ...

A template is Jinja from a checkpoint folder, run in a sandbox. What it writes may become control
tokens; what stands in a message may not: such text is disguised while the template runs and is text
again afterwards. So a problem can end no turn, and the number of control tokens does not depend on
what problems say.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
from etils import epath
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from opd_jax.data.tokenizer import Tokenizer

THINKING = ("default", "on", "off")
# In an assistant's message these are tokens even where the vocabulary calls them special.
THOUGHTS = ("<think>", "</think>")

_SPECIAL_KEYS = ("bos_token", "eos_token", "pad_token", "unk_token")
# Noncharacters: no text has them, and no template looks for them.
_DISGUISES = [chr(0xFDD0 + i) for i in range(32)]


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A template's source and what it may name.

    Attributes:
      source: Jinja.
      variables: texts of special tokens by name, e.g. {"bos_token": "<s>"}.
      where: the file, for error messages.
    """

    source: str
    variables: Mapping[str, str]
    where: str

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool,
        thinking: str = "default",
    ) -> str:
        """The conversation as one text, special tokens spelt out.

        Args:
          messages: each {"role": "system" | "user" | "assistant", "content": text}.
          add_generation_prompt: end with what precedes an assistant's answer.
          thinking: "on" or "off" passes `enable_thinking`; "default" leaves it to the template.

        Raises:
          ValueError: the template refuses the conversation, or is broken.
        """
        options = {} if thinking == "default" else {"enable_thinking": thinking == "on"}
        try:
            return _compile(self.source).render(
                messages=[dict(m) for m in messages],
                add_generation_prompt=add_generation_prompt,
                **self.variables,
                **options,
            )
        # SecurityError, UndefinedError and whatever the template's own expressions raise.
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise ValueError(f"chat template {self.where}: {error}") from error


@dataclasses.dataclass(frozen=True)
class ChatOptions:
    """How prompts are laid out with a template."""

    system: str = ""  # The system message; empty: none is given, the template may have its own.
    thinking: str = "default"  # One of THINKING.

    def __post_init__(self):
        if self.thinking not in THINKING:
            raise ValueError(f"chat.thinking={self.thinking!r}: one of {', '.join(THINKING)}")


def read(path: epath.PathLike) -> ChatTemplate:
    """The chat template of a checkpoint folder, or of a `.jinja` file.

    In a folder `chat_template.jinja` goes before the entry of `tokenizer_config.json`, as in
    Hugging Face's own loader. The special tokens' texts are those of the `tokenizer_config.json`
    beside it.

    Raises:
      ValueError: there is none, or it is no valid template.
    """
    found = find(path)
    if found is None:
        raise ValueError(
            f"{path}: no chat template; give a folder with chat_template.jinja, or with a "
            "chat_template in tokenizer_config.json, or the path of a .jinja file"
        )
    return found


def find(path: epath.PathLike) -> ChatTemplate | None:
    """The same as `read`, or None where there is no template.

    Raises:
      ValueError: it is no valid template.
    """
    path = epath.Path(path)
    folder = path if path.is_dir() else path.parent
    beside = folder / "tokenizer_config.json"
    own = json.loads(beside.read_text()) if beside.exists() else {}
    if path.is_dir():
        path = folder / "chat_template.jinja"
    if path.exists():
        source, where = path.read_text(), path
    else:
        source, where = _listed(own.get("chat_template")), beside
    if source is None:
        return None
    try:
        _compile(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"chat template {where}: {error}") from error
    texts = {key: own.get(key) for key in _SPECIAL_KEYS}
    texts = {key: t["content"] if isinstance(t, dict) else t for key, t in texts.items()}
    return ChatTemplate(source, {k: t for k, t in texts.items() if t is not None}, str(where))


def end_of_turn(tokenizer: Tokenizer, template: ChatTemplate) -> int | None:
    """The special token that a template writes behind an assistant's answer, if any.

    A model that was trained with the template ends its answers with it, whatever it reads.
    """
    return _Dialogue(tokenizer, template, ChatOptions()).end_of_turn()


class _Dialogue:
    """Conversations as texts and special tokens in a row."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, options: ChatOptions):
        self._template, self._options, self.special = template, options, tokenizer.special

    def conversation(self, text: str) -> list[dict[str, str]]:
        """A problem as messages."""
        system = self._options.system
        first = [{"role": "system", "content": system}] if system else []
        return [*first, {"role": "user", "content": text}]

    def parts(self, messages, add_generation_prompt: bool) -> list[str | int]:
        """The rendered conversation, cut at the special tokens that the template wrote."""
        contents = [m["content"] for m in messages]
        disguise = _Disguise(self.special, contents)
        for_answers = _Disguise([t for t in self.special if t not in THOUGHTS], contents)
        hidden = {"assistant": for_answers.on}
        rendered = self._template.render(
            [{**m, "content": hidden.get(m["role"], disguise.on)(m["content"])} for m in messages],
            add_generation_prompt=add_generation_prompt,
            thinking=self._options.thinking,
        )
        parts = self.cut(rendered, self.special)
        return [disguise.off(p) if isinstance(p, str) else p for p in parts]

    def cut(self, text: str, at: Iterable[str]) -> list[str | int]:
        """A text cut at some special tokens' texts."""
        found = re.split(f"({_any_of(t for t in at if t in self.special)})", text)
        return [self.special[t] if i % 2 else t for i, t in enumerate(found) if t]

    def end_of_turn(self) -> int | None:
        """The special token that the template writes behind an assistant's answer, if any."""
        question, answer = "0", "1"
        parts = self.parts(
            [*self.conversation(question), {"role": "assistant", "content": answer}], False
        )
        texts = [i for i, part in enumerate(parts) if isinstance(part, str) and answer in part]
        ends = [p for p in parts[texts[-1] + 1 :] if isinstance(p, int)] if texts else []
        return ends[0] if ends else None


class ChatTokenizer:
    """A tokenizer whose prompts are conversations. The interface is that of Tokenizer.

    A problem is the user's message. The token that ends an assistant's turn stops a completion,
    whether or not the checkpoint's configs say so, and goes first: it ends reference solutions.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, options: ChatOptions):
        """Tests the template on a short conversation.

        Raises:
          ValueError: the template loses a message, or nothing ends the assistant's turn.
        """
        self._tokenizer, self._dialogue = tokenizer, _Dialogue(tokenizer, template, options)
        self.where, self._system = template.where, options.system
        self.vocab_size = tokenizer.vocab_size
        self.pad_id, self.bos_id = tokenizer.pad_id, tokenizer.bos_id
        self.special = tokenizer.special
        end = self._dialogue.end_of_turn()
        if end is None:
            raise ValueError(
                f"chat template {template.where}: no special token follows an assistant's answer, "
                "so a model could never learn to stop; is it of another tokenizer?"
            )
        self.stop_ids = tuple(dict.fromkeys((end, *tokenizer.stop_ids)))
        self._check_messages()

    def encode_prompt(self, text: str) -> list[int]:
        """See Tokenizer: the conversation up to where the assistant's answer begins."""
        return self.encode_chat(self._dialogue.conversation(text))

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Tokens of a conversation, bos once if the model was trained with one.

        Args:
          messages: as in ChatTemplate.render; no message's text becomes a special token.
          add_generation_prompt: end with what precedes an assistant's answer.
        """
        parts = self._dialogue.parts(messages, add_generation_prompt)
        ids = self._tokenizer.encode_parts(parts)
        if self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        return ids

    def extends_history(self) -> bool:
        """Whether a next turn only adds tokens to what the model has read and written so far.

        False for templates that rewrite earlier turns, e.g. leave their thoughts out: completions
        of a conversation's steps are then no prefixes of each other, and each step must be a
        sample of its own.
        """
        before = [{"role": "user", "content": "a"}]
        answer = "<think>\nb\n</think>\n\nc"
        after = [
            *before,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "d"},
        ]
        written = self.encode_parts(self._dialogue.cut(answer, THOUGHTS))
        read = [*self.encode_chat(before), *written, self.stop_ids[0]]
        return self.encode_chat(after)[: len(read)] == read

    def encode(self, text: str) -> list[int]:
        """See Tokenizer: a text by itself, say a completion."""
        return self._tokenizer.encode(text)

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """See Tokenizer."""
        return self._tokenizer.encode_parts(parts)

    def decode(self, ids: Sequence[int], *, continues: bool = False) -> str:
        """See Tokenizer."""
        kept = [int(i) for i in ids if int(i) != self.stop_ids[0]]
        return self._tokenizer.decode(kept, continues=continues)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """See Tokenizer."""
        return self._tokenizer.pieces(ids)

    def fingerprint(self) -> str:
        """See Tokenizer: of the vocabulary alone."""
        return self._tokenizer.fingerprint()

    def _check_messages(self) -> None:
        shown = self.decode(self.encode_prompt("a question"))
        for text in (self._system, "a question"):
            if text.strip() not in shown:
                raise ValueError(
                    f"chat template {self.where} leaves a message out: {text!r} is not in {shown!r}"
                )


class _Disguise:
    """Hides the special tokens' texts in messages, also those that only begin or end there.

    The first character of every occurrence is replaced by a stand-in that no message has.
    """

    def __init__(self, special: Iterable[str], contents: Sequence[str]):
        special = list(special)
        firsts = sorted({text[0] for text in special})
        free = [c for c in _DISGUISES if not any(c in text for text in contents)]
        if len(firsts) >= len(free):
            raise ValueError(
                f"messages hold all but {len(free)} of the characters U+FDD0 to U+FDEF; they are "
                "no text, take them out"
            )
        self._of = dict(zip(firsts, free, strict=False))
        # A message may end in the beginning of a token whose rest the template writes.
        starts = {text[:n] for text in special for n in range(1, len(text))}
        # Or the other way round; then its own first character is hidden, whatever it is.
        self._ends = tuple({text[n:] for text in special for n in range(1, len(text))})
        self._of_end = free[len(firsts)]
        self._found = re.compile(f"{_any_of(special)}|(?:{_any_of(starts)})\\Z")

    def on(self, text: str) -> str:
        """The text as the template sees it."""
        hidden = self._found.sub(lambda m: self._of[m[0][0]] + m[0][1:], text)
        return self._of_end + hidden if text.startswith(self._ends) else hidden

    def off(self, text: str) -> str:
        """The text as it was."""
        for first, stand_in in self._of.items():
            text = text.replace(stand_in, first)
        return text.replace(self._of_end, "")


def _any_of(texts: Iterable[str]) -> str:
    """A pattern for any of some texts, the longest first; for none, one that is found nowhere."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)"


def _listed(entry: Any) -> str | None:
    """A template given as text, or as the one named "default" of several."""
    if isinstance(entry, list):
        return next((item["template"] for item in entry if item["name"] == "default"), None)
    return entry


class _Generation(Extension):
    """`{% generation %}` marks answers for trainers that mask by it; here it changes nothing."""

    tags = frozenset({"generation"})

    def parse(self, parser) -> list[nodes.Node]:
        """What stands between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(source)
