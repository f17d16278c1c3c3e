"""Tokenizers behind one small interface: SentencePiece files and HF `tokenizer.json`.

Text is only ever text here: `encode` adds no token of its own and gives no control token whatever
the text says, so nothing that a user or a dataset wrote can end a turn or begin one. Control tokens
are put in by id, by whoever lays out the prompt (`templates.py`).

Both kinds reach this the same way: in the copy of the vocabulary that encodes, every special token
is spelt in a way that no text can guess.
"""

import copy
import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import sentencepiece
import tokenizers
from etils import epath
from sentencepiece import sentencepiece_model_pb2

NANO = epath.Path(__file__).parent / "nano.model"

# SentencePiece writes a space as this character; a real one in a text must not come back as space.
_SPACE_MARK = "\u2581"


class Tokenizer(Protocol):
    """What the project needs of a tokenizer.

    Attributes:
      vocab_size: one more than the largest token id.
      pad_id: fills padding. Nobody looks for it: padding is told by lengths alone.
      bos_id: goes before every prompt; None if the model was trained without.
      stop_ids: tokens that end a completion, the tokenizer's own first; at least one.
      special: text -> id of the tokens that no text can become.
    """

    vocab_size: int
    pad_id: int
    bos_id: int | None
    stop_ids: tuple[int, ...]
    special: Mapping[str, int]

    def encode(self, text: str) -> list[int]:
        """Tokens of a text: no bos, no eos, and special-token text stays text."""
        ...

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """Tokens of texts and special tokens (ids) in a row, as if they were one text."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """What a model reads before it completes `text`: bos once, if it was trained with one."""
        ...

    def decode(self, ids: Sequence[int], *, continues: bool = False) -> str:
        """Text of tokens; pad, bos and stop tokens are skipped.

        With `continues` the tokens follow others, so that a space before the first one stays; that
        of a whole text is SentencePiece's own and goes.
        """
        ...

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's entries for some ids, to look at."""
        ...

    def fingerprint(self) -> str:
        """Hash of the vocabulary; equal for two tokenizers whose ids mean the same."""
        ...


def load(spec: str) -> Tokenizer:
    """The tokenizer of a spec.

    Args:
      spec: "nano" (built in), the path of a SentencePiece ".model" file, or an HF `tokenizer.json`
        or the folder that holds one (or else a `tokenizer.model`); the `generation_config.json`,
        `config.json` and `tokenizer_config.json` beside it then say which tokens stop. Any path
        that epath takes.

    Raises:
      ValueError: there is no such file, it cannot be read, or no stop token is known.
    """
    path = NANO if spec == "nano" else epath.Path(spec)
    if path.is_dir():
        json_path, model_path = path / "tokenizer.json", path / "tokenizer.model"
        path = model_path if model_path.exists() and not json_path.exists() else json_path
    if not path.is_file():
        raise ValueError(
            f"tokenizer {spec!r}: there is no file {path}; give 'nano', a SentencePiece .model "
            "file, or a folder with tokenizer.json or tokenizer.model"
        )
    if path.suffix == ".model":
        return SentencePieceTokenizer(path)
    if path.suffix == ".json":
        return HFTokenizer(path)
    raise ValueError(f"tokenizer {spec!r}: {path} ends neither in .model nor in .json")


def stopping_at(tokenizer: Tokenizer, classes: Sequence[Sequence[int]]) -> Tokenizer:
    """The tokenizer with all tokens of a class as stops where one of them is; its own stay first.

    Example: stops (0,), classes ((0, 2), (5, 6)) -> stops (0, 2).
    """
    own = tokenizer.stop_ids
    more = [token for ids in classes if not set(own).isdisjoint(ids) for token in ids]
    other = copy.copy(tokenizer)
    other.stop_ids = tuple(dict.fromkeys((*own, *more)))
    return other


def align(student: Tokenizer, teacher: Tokenizer) -> int:
    """Width of the vocabulary that two models share, by token string.

    Rows beyond it are padding (Qwen: 151,665 tokens in 151,936 or 152,064 rows) or tokens that one
    of them never saw: cut both models' logits there and renormalise.

    Returns:
      n, such that every id below n is the same token in both, or none in both.

    Raises:
      ValueError: below n an id means two things, with the first of them; or a stop token of the
        student is n or above, which the teacher could never reward.
    """
    n = min(student.vocab_size, teacher.vocab_size)
    pieces = (np.array(t.pieces(range(n)), object) for t in (student, teacher))
    ours_V, theirs_V = pieces
    differing = np.flatnonzero(ours_V != theirs_V)
    if differing.size:
        shown = ", ".join(f"{i}: {ours_V[i]!r} / {theirs_V[i]!r}" for i in differing[:5])
        raise ValueError(
            f"{differing.size} of {n} token ids mean different things to student and teacher, the "
            f"first (id: student / teacher) {shown}; use a teacher with the student's tokenizer"
        )
    beyond = [i for i in student.stop_ids if i >= n]
    if beyond:
        raise ValueError(
            f"the student stops at {student.pieces(beyond)} (ids {beyond}), but the teacher's "
            f"vocabulary ends at {n}: it could never reward the end of a completion"
        )
    return n


def first_difference(a: Tokenizer, b: Tokenizer) -> str | None:
    """The first id that means different things in two vocabularies, readable; None if equal."""
    pieces_a, pieces_b = (t.pieces(range(t.vocab_size)) for t in (a, b))
    for i, (x, y) in enumerate(zip(pieces_a, pieces_b, strict=False)):
        if x != y:
            return f"token {i} is {x!r} in the first vocabulary and {y!r} in the second"
    if len(pieces_a) != len(pieces_b):
        i = min(len(pieces_a), len(pieces_b))
        longer, which = max((pieces_a, "first"), (pieces_b, "second"), key=lambda t: len(t[0]))
        return (
            f"vocabulary sizes are {len(pieces_a)} and {len(pieces_b)}; "
            f"token {i} is {longer[i]!r}, only in the {which}"
        )
    return None


class SentencePieceTokenizer:
    """A SentencePiece model file and the configs beside it. The interface is that of Tokenizer."""

    def __init__(self, path: epath.PathLike):
        path = epath.Path(path)
        proto = _sentencepiece_proto(path)
        self._model = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
        bos, eos, pad = self._model.bos_id(), self._model.eos_id(), self._model.pad_id()
        if eos < 0:
            raise ValueError(f"{path} declares no eos token; train it with eos_id >= 0")
        self.vocab_size = self._model.get_piece_size()
        own = _read_json(path.parent / "tokenizer_config.json", missing={})
        self.stop_ids = _stop_ids(path.parent, eos, self.vocab_size)
        with_bos = bos >= 0 and own.get("add_bos_token") is not False
        self.bos_id = bos if with_bos else None
        self.pad_id = pad if pad >= 0 else eos
        self._control = {bos, pad, *self.stop_ids}
        listed = own.get("added_tokens_decoder", {})
        ids = {int(i) for i in listed if listed[i].get("special")} | self._control - {-1}
        ids |= {i for i in range(self.vocab_size) if self._model.is_control(i)}
        self.special = {self._model.id_to_piece(i): i for i in sorted(ids)}
        for i in ids:
            proto.pieces[i].piece = _unguessable(i)
        self._first = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
        # A part that follows another gets no space of its own in front.
        proto.normalizer_spec.add_dummy_prefix = False
        self._later = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
        marks = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE_MARK.encode()]
        self._space_mark = marks if all(map(self._model.is_byte, marks)) else None

    def encode(self, text: str) -> list[int]:
        """See Tokenizer."""
        return self.encode_parts([text])

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """See Tokenizer."""
        ids: list[int] = []
        for part in parts:
            ids += [part] if isinstance(part, int) else self._encode(part, first=not ids)
        return ids

    def _encode(self, text: str, first: bool) -> list[int]:
        texts = text.split(_SPACE_MARK) if self._space_mark is not None else [text]
        ids = (self._first if first else self._later).encode(texts[0])
        for later in texts[1:]:
            ids += self._space_mark + self._later.encode(later)
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """See Tokenizer."""
        return _prompt(self, text)

    def decode(self, ids: Sequence[int], *, continues: bool = False) -> str:
        """See Tokenizer. Half a UTF-8 character comes out as replacement signs."""
        kept = [int(i) for i in ids if int(i) not in self._control]
        if not continues:
            return self._model.decode(kept)
        text = self._later.decode(kept)
        for piece, i in self.special.items():
            text = text.replace(self._later.id_to_piece(i), piece)
        return text

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """See Tokenizer."""
        return [self._model.id_to_piece(int(i)) for i in ids]

    def fingerprint(self) -> str:
        """See Tokenizer."""
        return _fingerprint(self)


class HFTokenizer:
    """An HF `tokenizer.json` and the configs beside it. The interface is that of Tokenizer."""

    def __init__(self, path: epath.PathLike):
        path = epath.Path(path)
        folder = path.parent
        spec = _without_clean_up(_read_json(path))
        own = _read_json(folder / "tokenizer_config.json", missing={})
        self._model = _hf_model(path, spec)
        named = {
            key: _token_id(self._model, own, key) for key in ("eos_token", "bos_token", "pad_token")
        }
        vocabulary = self._model.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.stop_ids = _stop_ids(folder, named["eos_token"], self.vocab_size)
        self.bos_id = _bos_id(self._model, own, named["bos_token"])
        pad = named["pad_token"]
        self.pad_id = self.stop_ids[0] if pad is None else pad
        self._control = {self.pad_id, self.bos_id, named["bos_token"], *self.stop_ids}
        # A control token that the file lists as an ordinary added token must be no text either.
        self.special = {
            token["content"]: token["id"]
            for token in spec.get("added_tokens", [])
            if token["special"] or token["id"] in self._control
        }
        self._spelling = {i: _unguessable(i) for i in self.special.values()}
        self._encoder = _hf_model(path, _respelt(spec, self._spelling))

    def encode(self, text: str) -> list[int]:
        """See Tokenizer."""
        return self.encode_parts([text])

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """See Tokenizer."""
        text = "".join(p if isinstance(p, str) else self._spelling[p] for p in parts)
        return self._encoder.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """See Tokenizer."""
        return _prompt(self, text)

    def decode(self, ids: Sequence[int], *, continues: bool = False) -> str:
        """See Tokenizer. Other special tokens, say think tags, stay: verifiers may need them."""
        kept = [int(i) for i in ids if int(i) not in self._control]
        if not continues:
            return self._model.decode(kept, skip_special_tokens=False)
        before = self._model.encode("a", add_special_tokens=False).ids
        text = self._model.decode(before + kept, skip_special_tokens=False)
        return text[len(self._model.decode(before)) :]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """See Tokenizer; ids that the vocabulary leaves out give ""."""
        return [self._model.id_to_token(int(i)) or "" for i in ids]

    def fingerprint(self) -> str:
        """See Tokenizer."""
        return _fingerprint(self)


def _prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return bos + tokenizer.encode(text)


def _unguessable(token_id: int) -> str:
    """A spelling of a special token that is in no text: random, and framed in noncharacters."""
    return f"\ufdd0{token_id}:{secrets.token_hex(8)}\ufdd1"


def _sentencepiece_proto(path: epath.Path) -> sentencepiece_model_pb2.ModelProto:
    try:
        content = path.read_bytes()
        sentencepiece.SentencePieceProcessor(model_proto=content)
        return sentencepiece_model_pb2.ModelProto.FromString(content)
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{path} is not a SentencePiece model: {error}") from error


def _respelt(spec: dict[str, Any], spelling: Mapping[int, str]) -> dict[str, Any]:
    """The same tokenizer with other texts for some of its tokens."""
    spec = copy.deepcopy(spec)
    spec["post_processor"] = (
        None  # It names tokens by their texts, and adds them; neither is asked.
    )
    old = {t["content"]: spelling[t["id"]] for t in spec["added_tokens"] if t["id"] in spelling}
    for token in spec["added_tokens"]:
        token["content"] = old.get(token["content"], token["content"])
    vocabulary = spec["model"]["vocab"]
    if isinstance(vocabulary, dict):
        spec["model"]["vocab"] = {old.get(text, text): i for text, i in vocabulary.items()}
    else:  # Unigram: pairs of text and score.
        spec["model"]["vocab"] = [[old.get(text, text), score] for text, score in vocabulary]
    if spec["model"].get("unk_token") in old:
        spec["model"]["unk_token"] = old[spec["model"]["unk_token"]]
    return spec


def _without_clean_up(spec: dict[str, Any]) -> dict[str, Any]:
    """A decoder that tidies up spaces would mark another text than the model wrote."""
    decoder = spec.get("decoder") or {}
    steps = decoder.get("decoders", [decoder])
    for step in steps:
        if "cleanup" in step:
            step["cleanup"] = False
    return spec


def _fingerprint(tokenizer: Tokenizer) -> str:
    pieces = tokenizer.pieces(range(tokenizer.vocab_size))
    return hashlib.sha256(json.dumps(pieces).encode()).hexdigest()[:16]


def _read_json(path: epath.Path, missing: dict | None = None) -> dict[str, Any]:
    """A JSON object; `missing`, if given, where there is no such file."""
    if missing is not None and not path.exists():
        return missing
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _hf_model(path: epath.Path, spec: dict[str, Any]) -> tokenizers.Tokenizer:
    try:
        model = tokenizers.Tokenizer.from_str(json.dumps(spec))
    # The library raises a bare Exception for whatever it does not like in the file.
    except Exception as error:
        raise ValueError(f"{path} is not a tokenizer.json: {error}") from error
    # Files saved in the middle of a training run carry its limits, which would cut prompts.
    model.no_truncation()
    model.no_padding()
    return model


def _token_id(model: tokenizers.Tokenizer, own: dict[str, Any], key: str) -> int | None:
    """Id of a token named in tokenizer_config.json, as text or as {"content": text}."""
    token = own.get(key)
    text = token["content"] if isinstance(token, dict) else token
    return None if text is None else model.token_to_id(text)


def _stop_ids(folder: epath.Path, own: int | None, vocab_size: int) -> tuple[int, ...]:
    """The tokenizer's own eos, then those of generation_config.json and config.json, each once."""
    found = [] if own is None else [own]
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ids = _read_json(path, missing={}).get("eos_token_id")
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if any(type(i) is not int or i < 0 for i in ids):
            raise ValueError(f"{path}: eos_token_id {ids} must be a token id or a list of them")
        found += ids
    if not found:
        raise ValueError(
            f"{folder}: no stop token; put eos_token_id into generation_config.json or eos_token "
            "into tokenizer_config.json"
        )
    if max(found) >= vocab_size:
        raise ValueError(
            f"{folder}: stop id {max(found)} is outside the vocabulary of {vocab_size} tokens; the "
            "config beside the tokenizer is of another model"
        )
    return tuple(dict.fromkeys(found))


def _bos_id(model: tokenizers.Tokenizer, own: dict[str, Any], named: int | None) -> int | None:
    """The token that this tokenizer puts before a text when asked for special tokens, if any.

    Not every model that names a bos token was trained with it in front (Qwen, GPT-2).
    """
    if isinstance(own.get("add_bos_token"), bool):
        return named if own["add_bos_token"] else None
    bare = model.encode("a", add_special_tokens=False).ids
    full = model.encode("a", add_special_tokens=True).ids
    return full[0] if full[:1] != bare[:1] else None
