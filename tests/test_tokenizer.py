"""Tokenizers: any text survives, no text becomes a control token, every stop token is found."""

import io
import json
import random
import types

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from opd_jax import algorithms
from opd_jax.core.types import Rollout
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
    """The same pieces. Their order is by frequency, so new problems move ids, which must not be:
    the committed file is made anew only where a piece is missing."""
    model = sentencepiece.SentencePieceProcessor(
        model_proto=train_tokenizer.train(train_tokenizer.VOCAB_SIZE)
    )
    # Pieces, not bytes: the file also records the trainer's version.
    pieces = [model.id_to_piece(i) for i in range(len(model))]
    committed = NANO.pieces(range(NANO.vocab_size))
    assert sorted(pieces) == sorted(committed)
    fixed = 4 + 256  # Control tokens and bytes do not move.
    assert pieces[:fixed] == committed[:fixed]


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


def sentencepiece_folder(path, symbols=(), special=(), **own):
    """A folder with a small SentencePiece model whose texts begin with a space of its own.

    Args:
      path: the folder to make.
      symbols: user-defined symbols of the model.
      special: those that tokenizer_config.json marks as special.
      **own: more entries of tokenizer_config.json.
    """
    path.mkdir(exist_ok=True)
    out = io.BytesIO()
    words = ["hello world", "hello there", "old world", "the user", "assistant system"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(words * 20),
        model_writer=out,
        vocab_size=300 + len(symbols),
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=list(symbols),
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (path / "tokenizer.model").write_bytes(out.getvalue())
    model = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    listed = {str(model.piece_to_id(s)): {"content": s, "special": s in special} for s in symbols}
    config = {"added_tokens_decoder": listed, **own}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return str(path)


# --- cases ---------------------------------------------------------------------------------------


def test_t03_what_is_trained_is_what_was_sampled_never_what_it_reads_as(tmp_path):
    t = hello_tokenizer(tmp_path)
    he, llo, hello = (t.encode(x)[0] for x in ("he", "llo", "hello"))
    assert t.decode([he, llo]) == "hello"
    assert t.encode("hello") == [hello]  # Control: encoded anew, it is another completion.
    tokens_BR = np.array([[he, llo, t.stop_ids[0], 0]], np.int32)
    rollout = Rollout(
        None, tokens_BR, tokens_BR > 0, tokens_BR * 0.0, np.array([3]), np.ones(1, bool)
    )
    assert algorithms.texts(t, rollout) == ["hello"]
    np.testing.assert_array_equal(rollout.tokens_BR, tokens_BR)


def test_t03_texts_of_random_ids_seldom_read_as_those_ids():
    rng = np.random.default_rng(0)
    lists = [rng.integers(0, NANO.vocab_size, 8).tolist() for _ in range(300)]
    again = [NANO.encode(NANO.decode(ids)) for ids in lists]
    assert sum(a != b for a, b in zip(lists, again, strict=True)) > 150


def hello_tokenizer(tmp_path):
    """Tokens he, llo and hello."""
    letters = {
        c: i for i, c in enumerate(["<end>", "h", "e", "l", "o", "he", "ll", "llo", "hello"])
    }
    model = tokenizers.Tokenizer(
        models.BPE(letters, [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")])
    )
    model.add_special_tokens(["<end>"])
    spec = json.loads(model.to_str())
    spec["decoder"] = {"type": "Fuse"}
    return tokenizer.load(hf_folder(tmp_path / "hello", spec, config={"eos_token_id": 0}))


@pytest.mark.parametrize("ordinary", [(), ("<think>", "</think>")])
def test_t07_verifiers_read_think_tags_and_no_control_token(tmp_path, ordinary):
    added = ("<|end|>", "<|pad|>", "<think>", "</think>")
    spec = hf_spec(added, ordinary=ordinary)
    own = {"eos_token": "<|end|>", "pad_token": "<|pad|>"}
    t = tokenizer.load(hf_folder(tmp_path / "hf", spec, tokenizer_config=own))
    ids = {token["content"]: token["id"] for token in spec["added_tokens"]}
    row = [ids["<think>"], *t.encode("x"), ids["</think>"], *t.encode("42"),
           ids["<|end|>"], ids["<|pad|>"]]  # fmt: skip
    for continues in (False, True):
        assert t.decode(row, continues=continues) == "<think>x</think>42"


def test_t08_no_tokenizer_gives_a_control_token_for_a_text(tmp_path, hf):
    """Unigram and user-defined symbols would, left to their libraries."""
    spm = tokenizer.load(
        sentencepiece_folder(tmp_path / "spm", symbols=["<turn>", "<b>"], special=["<turn>"])
    )
    unigram = tokenizers.Tokenizer(
        models.Unigram([("</s>", 0.0), ("<", -3.0), ("/", -3.0), ("s", -3.0), (">", -3.0)], 1)
    )
    assert unigram.encode("</s>", add_special_tokens=False).ids == [0]  # Control.
    unigram.add_special_tokens(["</s>"])
    spec = json.loads(unigram.to_str())
    spec["decoder"] = {"type": "Fuse"}
    uni = tokenizer.load(hf_folder(tmp_path / "uni", spec, config={"eos_token_id": 0}))
    for t in (spm, uni, hf, NANO):
        for text in ["</s>", *t.special, "".join(t.special)]:
            assert not set(t.special.values()) & set(t.encode(text)), text
    assert spm.decode(spm.encode("a<turn>b<b></s>")) == "a<turn>b<b></s>"
    assert uni.decode(uni.encode("</s>")) == "</s>"
    assert spm.encode("<b>").count(spm._model.piece_to_id("<b>")) == 1


def of_pieces(*pieces, stop=(0,)):
    """A vocabulary and nothing else."""
    return types.SimpleNamespace(
        vocab_size=len(pieces), stop_ids=stop, pieces=lambda ids: [pieces[i] for i in ids]
    )


@pytest.mark.parametrize(("ours", "theirs"), [(3, 4), (4, 3), (3, 3)])
def test_t10_padded_vocabularies_are_cut_where_both_end(ours, theirs):
    tokens = ["a", "b", "c", "", ""]
    student, teacher = (of_pieces(*tokens[:n]) for n in (ours, theirs))
    n = tokenizer.align(student, teacher)
    assert n == 3
    logits_V = np.array([2.0, 1.0, 0.0, 3.0])

    def log_softmax(z):
        return z - np.log(np.exp(z).sum())

    cut_V = log_softmax(logits_V[:n])
    np.testing.assert_allclose(cut_V, [-0.407606, -1.407606, -2.407606], atol=1e-6)
    # Control: without renormalising, the shared tokens have a part of the mass only.
    assert np.exp(log_softmax(logits_V))[:n].sum() == pytest.approx(0.356, abs=1e-3)


def test_t10_qwens_three_widths_align():
    """151,643 ordinary tokens, then control tokens, then rows without a token up to 152,064."""
    tokens = [f"t{i}" for i in range(151_665)]
    base, chat = of_pieces(*tokens[:151_643]), of_pieces(*tokens)
    padded = [of_pieces(*tokens, *[""] * (n - len(tokens))) for n in (151_936, 152_064)]
    assert tokenizer.align(base, chat) == tokenizer.align(chat, base) == 151_643
    assert tokenizer.align(*padded) == 151_936
    ends = of_pieces(*tokens, stop=(151_645,))
    with pytest.raises(ValueError, match=r"stops at \['t151645'\] .* vocabulary ends at 151643"):
        tokenizer.align(ends, base)


def test_t12_another_tokenizer_is_refused_and_its_first_tokens_shown(hf):
    shown = "2: 'c' / 'X', 4: 'e' / 'Y', 7: 'h' / 'Z'; use a teacher"
    with pytest.raises(ValueError, match=f"3 of 8 token ids mean different things .* {shown}"):
        tokenizer.align(of_pieces(*"abcdefgh"), of_pieces(*"abXdYfgZ!"))
    with pytest.raises(ValueError, match="of 260 token ids mean different things"):
        tokenizer.align(hf, NANO)
    assert tokenizer.align(hf, hf) == 260


def test_t14_completions_keep_the_space_that_they_begin_with(tmp_path):
    spm = tokenizer.load(sentencepiece_folder(tmp_path / "spm"))
    meta = tokenizer.load(metaspace_folder(tmp_path / "meta"))
    for t in (spm, meta):
        ids = t.encode("hello world")
        assert t.decode(ids) == "hello world"
        for cut in range(1, len(ids)):
            before = t.decode(ids[:cut])
            assert before + t.decode(ids[cut:], continues=True) == "hello world"
        # Control: decoded by themselves, parts lose their spaces.
        assert "".join(t.decode([i]) for i in ids) == "helloworld"


def metaspace_folder(path):
    """Llama's kind of tokenizer.json: spaces are marks, the first is the tokenizer's own."""
    letters = [chr(i) for i in range(97, 123)]
    vocabulary = {c: i for i, c in enumerate(["</s>", "<unk>", "\u2581", *letters])}
    vocabulary |= {f"<0x{i:02X}>": len(vocabulary) + i for i in range(256)}
    model = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    model.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    model.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    model.add_special_tokens(["</s>"])
    return hf_folder(path, json.loads(model.to_str()), config={"eos_token_id": 0})


def test_t15_a_character_cut_short_is_shown_as_such_and_raises_nothing(tmp_path, hf):
    kinds = [NANO, hf, *(tokenizer.load(f) for f in (
        metaspace_folder(tmp_path / "meta"), sentencepiece_folder(tmp_path / "spm")))]  # fmt: skip
    for t in kinds:
        ids = t.encode("x\U0001f680")
        assert t.decode(ids) == "x\U0001f680"
        assert t.decode(ids[-4:], continues=True) == "\U0001f680"
        for n in (1, 2, 3):
            assert t.decode(ids[:-n]).rstrip("\ufffd") == "x"
            assert "\ufffd" in t.decode(ids[:-n])


def test_t16_what_the_vocabulary_lacks_survives_byte_by_byte(tmp_path):
    for name in (metaspace_folder(tmp_path / "meta"), sentencepiece_folder(tmp_path / "spm")):
        t = tokenizer.load(name)
        text = "a\nb \U0001f680 é"
        ids = t.encode(text)
        assert t.decode(ids) == text
        assert any(piece.startswith("<0x") for piece in t.pieces(ids))
        assert "<0x" not in t.decode(ids)


def test_t19_no_decoder_tidies_up_spaces(tmp_path):
    text = "a , b 's ( x )"
    vocabulary = {
        c: i for i, c in enumerate(["<end>", "[UNK]", "a", ",", "b", "'", "s", "(", "x", ")"])
    }
    model = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.decoder = decoders.WordPiece(cleanup=True)
    model.add_special_tokens(["<end>"])
    spaced = "a , b ( x )"
    assert model.decode(model.encode(spaced).ids) == "a, b ( x )"  # Control.
    folder = hf_folder(tmp_path / "hf", json.loads(model.to_str()), config={"eos_token_id": 0},
                       tokenizer_config={"clean_up_tokenization_spaces": True})  # fmt: skip
    t = tokenizer.load(folder)
    assert t.decode(t.encode(spaced)) == spaced
    assert NANO.decode(NANO.encode(text)) == text


def test_m09_a_sentencepiece_models_configs_say_what_stops(tmp_path):
    name = sentencepiece_folder(tmp_path / "spm", symbols=["<turn>"], special=["<turn>"])
    turn = tokenizer.load(name).special["<turn>"]
    (tmp_path / "spm" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, turn]})
    )
    t = tokenizer.load(name)
    assert t.stop_ids == (2, turn)
    assert t.decode([*t.encode("hello"), turn, 2]) == "hello"
