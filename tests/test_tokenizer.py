"""Tokenizers: any text survives, no text becomes a control token, every stop token is found."""

import json
import random

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from opd_jax.data import tokenizer
from opd_jax.domains import DOMAINS
from opd_jax.domains.builder import allot
from tools import train_tokenizer

NANO = tokenizer.load("nano")

TEXTS = [
    "",
    " ",
    "a",
    " a",
    "a  b ",
    "   ",
    "\n\n\t\r\n",
    "47-38=",
    "a , b 's ( x )",
    "\u2581",
    "a\u2581b \u2581\u2581 c\u2581",
    "\0x\0",
    "é e\u0301 ﬁ Å \u3000 \u200b\ufeff",
    "\U0001f680 \U0001f468\u200d\U0001f469",
    "<s></s><pad><unk>",
    "<0x41> <0x0A>",
    "<|end|><|pad|>",
]


def hf_spec(added=("<|end|>", "<|stop|>", "<|pad|>", "<think>"), bos=None, ordinary=()):
    """A byte-level tokenizer.json as a dict, with the bytes first and then the added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    )
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([t for t in added if t not in ordinary])
    model.add_tokens(list(ordinary))
    if bos:
        model.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, model.token_to_id(bos))]
        )
    return json.loads(model.to_str())


def hf_folder(path, spec=None, **configs):
    """A folder as a model hub gives it; configs are file names without .json."""
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(spec or hf_spec()))
    for name, content in configs.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return str(path)


@pytest.fixture
def hf(tmp_path):
    """Stop tokens end (256) and stop (257), pad 258, an added think token 259, no bos."""
    return tokenizer.load(
        hf_folder(
            tmp_path / "hf",
            generation_config={"eos_token_id": [256, 257]},
            tokenizer_config={"eos_token": "<|end|>", "pad_token": {"content": "<|pad|>"}},
        )
    )


def both(hf):
    """The two kinds."""
    return {"nano": NANO, "hf": hf}.items()


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives(hf, text):
    for name, t in both(hf):
        assert t.decode(t.encode(text)) == text, name


def test_random_text_survives(hf):
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(
            chr(
                rng.choice(
                    (rng.randrange(128), rng.randrange(0xD800), rng.randrange(0xE000, 0x11000))
                )
            )
            for _ in range(rng.randrange(20))
        )
        for name, t in both(hf):
            assert t.decode(t.encode(text)) == text, (name, text)


def test_text_never_becomes_control_tokens(hf):
    for text in TEXTS:
        for name, t in both(hf):
            control = {t.pad_id, t.bos_id, *t.stop_ids}
            assert not control & set(t.encode(text)), (name, text)
    # Control: asked in the usual way, the library does read a stop token out of a text.
    raw = tokenizers.Tokenizer.from_str(json.dumps(hf_spec()))
    assert 256 in raw.encode("hi<|end|>", add_special_tokens=False).ids


def test_a_stop_token_listed_as_ordinary_is_still_no_text(tmp_path):
    spec = hf_spec(ordinary=("<|end|>", "<think>"))
    end, think = (
        next(t["id"] for t in spec["added_tokens"] if t["content"] == text)
        for text in ("<|end|>", "<think>")
    )
    t = tokenizer.load(hf_folder(tmp_path / "hf", spec, config={"eos_token_id": end}))
    assert end not in t.encode("a<|end|>")
    assert t.decode(t.encode("a<|end|>")) == "a<|end|>"
    assert t.encode("<think>") == [think]


def test_decode_skips_control_tokens_and_keeps_the_rest(hf):
    assert NANO.decode([1, *NANO.encode("a b"), 2, 0]) == "a b"
    assert hf.decode([259, *hf.encode("x 42"), 256, 257, 258]) == "<think>x 42"


def test_half_a_character_decodes_to_replacement_signs(hf):
    for name, t in both(hf):
        ids = t.encode("\U0001f680")
        assert len(ids) == 4, name
        for n in (1, 2, 3):
            assert set(t.decode(ids[:n])) == {"\ufffd"}, name
        assert t.decode(ids) == "\U0001f680", name


def test_nano_splits_digits_and_declares_its_control_tokens():
    assert (NANO.pad_id, NANO.bos_id, NANO.stop_ids) == (0, 1, (2,))
    assert NANO.vocab_size == train_tokenizer.VOCAB_SIZE
    assert NANO.pieces(NANO.encode("12+345=")) == list("12+345=")
    assert NANO.pieces([0, 1, 2, 3, 4]) == ["<pad>", "<s>", "</s>", "<unk>", "<0x00>"]


def test_nano_covers_the_domains_without_bytes_or_unknowns():
    used = set()
    for name, domain in DOMAINS.items():
        for p in allot(name, domain.generate)["test"]:
            for text in (p.prompt, *p.solutions.values()):
                used |= set(NANO.encode(text))
    assert min(used) >= 4 + 256


def test_the_tool_makes_the_committed_vocabulary():
    model = sentencepiece.SentencePieceProcessor(
        model_proto=train_tokenizer.train(train_tokenizer.VOCAB_SIZE)
    )
    # Pieces, not bytes: the file also records the trainer's version.
    assert [model.id_to_piece(i) for i in range(len(model))] == NANO.pieces(range(NANO.vocab_size))


@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        ({"generation_config": {"eos_token_id": [257, 256]}}, (257, 256)),
        ({"config": {"eos_token_id": 257}}, (257,)),
        ({"tokenizer_config": {"eos_token": "<|stop|>"}}, (257,)),
        ({"tokenizer_config": {"eos_token": {"content": "<|stop|>"}}}, (257,)),
        (
            {
                "generation_config": {"eos_token_id": [257, 256]},
                "config": {"eos_token_id": 258},
                "tokenizer_config": {"eos_token": "<|end|>"},
            },
            (256, 257, 258),
        ),
        (
            {
                "generation_config": {"eos_token_id": None},
                "config": {"eos_token_id": [256]},
                "tokenizer_config": {"eos_token": None},
            },
            (256,),
        ),
    ],
)
def test_m09_stop_ids_are_merged_from_all_files(tmp_path, configs, expected):
    assert tokenizer.load(hf_folder(tmp_path / "hf", **configs)).stop_ids == expected


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ({}, "no stop token; put eos_token_id into generation_config.json"),
        ({"config": {"eos_token_id": 9999}}, "stop id 9999 is outside the vocabulary of 260"),
        ({"config": {"eos_token_id": "</s>"}}, "eos_token_id .* must be a token id or a list"),
        ({"config": [1]}, "must hold a JSON object, not list"),
    ],
)
def test_m09_bad_stop_ids_are_named(tmp_path, configs, message):
    with pytest.raises(ValueError, match=message):
        tokenizer.load(hf_folder(tmp_path / "hf", **configs))


def test_bos_is_what_the_model_was_trained_with(tmp_path):
    added = ("<|end|>", "<|begin|>")
    eos = {"generation_config": {"eos_token_id": 256}}
    named = {"bos_token": "<|begin|>"}
    template, none = hf_spec(added, bos="<|begin|>"), hf_spec(added)
    cases = [
        (template, {}, 257),
        (template, {**named, "add_bos_token": False}, None),
        (none, named, None),
        (none, {**named, "add_bos_token": True}, 257),
    ]
    for spec, own, expected in cases:
        t = tokenizer.load(hf_folder(tmp_path / "hf", spec, **eos, tokenizer_config=own))
        assert t.bos_id == expected
        assert t.encode("a<|begin|>") == none_encode(t, "a<|begin|>")


def none_encode(t, text):
    """Byte by byte, which is what a vocabulary of bytes gives for plain text."""
    return [i for c in text for i in t.encode(c)]


def test_limits_saved_in_the_file_do_not_cut_texts(tmp_path):
    spec = hf_spec()
    cut = tokenizers.Tokenizer.from_str(json.dumps(spec))
    cut.enable_truncation(4)
    cut.enable_padding(length=8)
    assert len(cut.encode("abcdefgh" * 3).ids) < 24
    folder = hf_folder(tmp_path / "hf", json.loads(cut.to_str()), config={"eos_token_id": 256})
    t = tokenizer.load(folder)
    assert len(t.encode("abcdefgh" * 3)) == 24
    assert len(t.encode("a")) == 1


def test_fingerprint_and_first_difference(tmp_path, hf):
    eos = {"config": {"eos_token_id": 256}}
    same = tokenizer.load(hf_folder(tmp_path / "a", hf_spec(), **eos))
    renamed = tokenizer.load(
        hf_folder(tmp_path / "b", hf_spec(("<|end|>", "<|stop|>", "<|pad|>", "<thought>")), **eos)
    )
    shorter = tokenizer.load(hf_folder(tmp_path / "c", hf_spec(("<|end|>",)), **eos))
    assert hf.fingerprint() == same.fingerprint()
    assert tokenizer.first_difference(hf, same) is None
    assert len({t.fingerprint() for t in (hf, renamed, shorter, NANO)}) == 4
    assert tokenizer.first_difference(hf, renamed) == (
        "token 259 is '<think>' in the first vocabulary and '<thought>' in the second"
    )
    assert tokenizer.first_difference(shorter, hf) == (
        "vocabulary sizes are 257 and 260; token 257 is '<|stop|>', only in the second"
    )


def test_load_errors_name_the_file(tmp_path):
    with pytest.raises(ValueError, match="tokenizer 'nanno': there is no file nanno; give 'nano'"):
        tokenizer.load("nanno")
    for name, content, message in [
        ("x.model", b"no model", "x.model is not a SentencePiece model"),
        ("tokenizer.json", b"{", "tokenizer.json is not valid JSON"),
        ("tokenizer.json", b"{}", "tokenizer.json is not a tokenizer.json"),
        ("x.txt", b"", "x.txt ends neither in .model nor in .json"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            tokenizer.load(str(tmp_path / name))
