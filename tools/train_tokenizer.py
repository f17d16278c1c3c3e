"""Trains the SentencePiece model of the miniature on the procedural domains' own text.

    python -m tools.train_tokenizer --out=opd_jax/data/nano.model --vocab_size=320

The same command gives the same vocabulary on every machine, so the committed file can be checked
against it. Any text survives: normalisation is the identity, spaces are kept as they are, and what
the domains do not use falls back to bytes.
"""

import io
import string
from collections.abc import Iterator

import sentencepiece
from absl import app, flags

from opd_jax.domains import DOMAINS
from opd_jax.domains.builder import allot

# 4 control tokens, 256 bytes, 31 characters of the domains and 29 of EXTRA: no room for a merge, so
# a small model reads characters and has one token for a letter wherever it stands. A multiple of
# 64, so that any mesh divides it. More than 320 gives merges, by byte-pair encoding.
VOCAB_SIZE = 320
EXTRA = string.ascii_lowercase + ".,?!_"  # For problems of your own; the rest of them is bytes.


def training_text() -> Iterator[str]:
    """Prompts and solutions of every training problem, each a sentence of its own as in use."""
    for name, domain in DOMAINS.items():
        for problem in allot(name, domain.generate)["train"]:
            yield problem.prompt
            yield from problem.solutions.values()


def train(vocab_size: int) -> bytes:
    """A serialised SentencePiece model: pad 0, bos 1, eos 2, unknown 3, then bytes, then pieces."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=training_text(),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        character_coverage=1.0,
        required_chars=EXTRA,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def _main(argv: list[str]) -> None:
    del argv
    with open(flags.FLAGS.out, "wb") as file:
        file.write(train(flags.FLAGS.vocab_size))
    print(f"wrote {flags.FLAGS.out}: {flags.FLAGS.vocab_size} tokens")


if __name__ == "__main__":
    flags.DEFINE_string("out", None, "Where to write the .model file.", required=True)
    flags.DEFINE_integer("vocab_size", VOCAB_SIZE, "Tokens in the vocabulary.")
    app.run(_main)
