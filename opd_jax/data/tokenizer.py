"""Tokenizers behind one small interface: SentencePiece files and HF `tokenizer.json`.

Text is only ever text here: `encode` adds no token of its own and gives no control token whatever
the text says, so nothing that a user or a dataset wrote can end a turn or begin one. Control tokens
are put in by id, by whoever lays out the batch (`prompts.py`).
"""

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any, Protocol

import sentencepiece
import tokenizers

NANO = os.path.join(os.path.dirname(__file__), "nano.model")

# SentencePiece writes a space as this character; a real one in a text must not come back as space.
_SPACE_MARK = "\u2581"


class Tokenizer(Protocol):
    """What the project needs of a tokenizer.

    Attributes:
      vocab_size: one more than the largest token id.
      pad_id: fills padding. Nobody looks for it: padding is told by lengths alone.
      bos_id: goes before every prompt; None if the model was trained without.
      stop_ids: tokens that end a completion, the tokenizer's own first; at least one.
    """

    vocab_size: int
    pad_id: int
    bos_id: int | None
    stop_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Tokens of a text: no bos, no eos, and special-token text stays text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens; pad, bos and stop tokens are skipped."""
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
        or the folder that holds one; the `generation_config.json`, `config.json` and
        `tokenizer_config.json` beside it then say which tokens stop.

    Raises:
      ValueError: there is no such file, it cannot be read, or no stop token is known.
    """
    path = NANO if spec == "nano" else spec
    if os.path.isdir(path):
        path = os.path.join(path, "tokenizer.json")
    if not os.path.isfile(path):
        raise ValueError(
            f"tokenizer {spec!r}: there is no file {path}; give 'nano', a SentencePiece .model "
            "file, or a folder with tokenizer.json"
        )
    if path.endswith(".model"):
        return SentencePieceTokenizer(path)
    if path.endswith(".json"):
        return HFTokenizer(path)
    raise ValueError(f"tokenizer {spec!r}: {path} ends neither in .model nor in .json")


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
    """A SentencePiece model file. The interface is that of Tokenizer."""

    def __init__(self, path: str):
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=path)
        except (OSError, RuntimeError) as error:
            raise ValueError(f"{path} is not a SentencePiece model: {error}") from error
        bos, eos, pad = self._model.bos_id(), self._model.eos_id(), self._model.pad_id()
        if eos < 0:
            raise ValueError(f"{path} declares no eos token; train it with eos_id >= 0")
        self.vocab_size = self._model.get_piece_size()
        self.stop_ids = (eos,)
        self.bos_id = bos if bos >= 0 else None
        self.pad_id = pad if pad >= 0 else eos
        self._control = {bos, eos, pad}
        marks = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE_MARK.encode()]
        self._space_mark = marks if all(map(self._model.is_byte, marks)) else None

    def encode(self, text: str) -> list[int]:
        """See Tokenizer."""
        if self._space_mark is None or _SPACE_MARK not in text:
            return self._model.encode(text)
        first, *others = text.split(_SPACE_MARK)
        ids = self._model.encode(first)
        for part in others:
            ids += self._space_mark + self._model.encode(part)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """See Tokenizer. Half a UTF-8 character comes out as replacement signs."""
        return self._model.decode([int(i) for i in ids if int(i) not in self._control])

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """See Tokenizer."""
        return [self._model.id_to_piece(int(i)) for i in ids]

    def fingerprint(self) -> str:
        """See Tokenizer."""
        return _fingerprint(self)


class HFTokenizer:
    """An HF `tokenizer.json` and the configs beside it. The interface is that of Tokenizer."""

    def __init__(self, path: str):
        folder = os.path.dirname(path)
        spec = _read_json(path)
        own = _read_json(os.path.join(folder, "tokenizer_config.json"), missing={})
        plain = _hf_model(path, spec)
        named = {key: _token_id(plain, own, key) for key in ("eos_token", "bos_token", "pad_token")}
        self.stop_ids = _stop_ids(folder, named["eos_token"])
        vocabulary = plain.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        if max(self.stop_ids) >= self.vocab_size:
            raise ValueError(
                f"{folder}: stop id {max(self.stop_ids)} is outside the vocabulary of "
                f"{self.vocab_size} tokens; the config beside tokenizer.json is of another model"
            )
        self.bos_id = _bos_id(plain, own, named["bos_token"])
        pad = named["pad_token"]
        self.pad_id = self.stop_ids[0] if pad is None else pad
        self._control = {self.pad_id, self.bos_id, named["bos_token"], *self.stop_ids}
        # A control token that the file lists as an ordinary added token would be found in texts.
        for token in spec.get("added_tokens", []):
            token["special"] = token["special"] or token["id"] in self._control
        self._model = _hf_model(path, spec)
        self._model.encode_special_tokens = True  # That is: encode their text as any other text.

    def encode(self, text: str) -> list[int]:
        """See Tokenizer."""
        return self._model.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """See Tokenizer. Other special tokens, say think tags, stay: verifiers may need them."""
        kept = [int(i) for i in ids if int(i) not in self._control]
        return self._model.decode(kept, skip_special_tokens=False)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """See Tokenizer; ids that the vocabulary leaves out give ""."""
        return [self._model.id_to_token(int(i)) or "" for i in ids]

    def fingerprint(self) -> str:
        """See Tokenizer."""
        return _fingerprint(self)


def _fingerprint(tokenizer: Tokenizer) -> str:
    pieces = tokenizer.pieces(range(tokenizer.vocab_size))
    return hashlib.sha256(json.dumps(pieces).encode()).hexdigest()[:16]


def _read_json(path: str, missing: dict | None = None) -> dict[str, Any]:
    """A JSON object; `missing`, if given, where there is no such file."""
    if missing is not None and not os.path.exists(path):
        return missing
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _hf_model(path: str, spec: dict[str, Any]) -> tokenizers.Tokenizer:
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


def _stop_ids(folder: str, own: int | None) -> tuple[int, ...]:
    """The tokenizer's own eos, then those of generation_config.json and config.json, each once."""
    found = [] if own is None else [own]
    for name in ("generation_config.json", "config.json"):
        path = os.path.join(folder, name)
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
