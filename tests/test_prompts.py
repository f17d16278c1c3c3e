"""The prompt pipeline: quotas, order and resume, layout of batches."""

import json
import types

import numpy as np
import pytest

from opd_jax.core.types import PromptBatch
from opd_jax.data import prompts, tokenizer
from opd_jax.data.problem import Problem

NANO = tokenizer.load("nano")


def problem(number, domain="a", prompt=None, **solutions):
    """A problem whose prompt is its number unless given."""
    text = f"{number}=" if prompt is None else prompt
    return Problem(domain, number, 1, text, str(number), solutions)


def fake_tokenizer(pad=2, bos=None, stop=(2,)):
    """Texts are token ids with spaces between."""

    def encode(text):
        return [int(i) for i in text.split()]

    def encode_prompt(text):
        return encode(text) if bos is None else [bos, *encode(text)]

    return types.SimpleNamespace(
        vocab_size=16,
        pad_id=pad,
        bos_id=bos,
        stop_ids=stop,
        encode=encode,
        encode_prompt=encode_prompt,
    )


def stream(sizes=(10, 7), quota=(3, 2), seed=0):
    """A stream over domains a and b."""
    problems = {d: [problem(i, d) for i in range(n)] for d, n in zip("ab", sizes, strict=True)}
    return prompts.PromptStream(problems, dict(zip("ab", quota, strict=True)), seed)


def ids(batches):
    """(domain, id) of batches."""
    return [[(p.domain, p.id) for p in batch] for batch in batches]


def take(s, count):
    """The next batches, as ids."""
    return ids(next(s) for _ in range(count))


def test_quotas_are_exact_whole_numbers():
    assert prompts.quotas({"a": 1, "b": 3}, 32) == {"a": 8, "b": 24}
    assert prompts.quotas({"a": 0.1, "b": 0.2, "c": 0.7}, 10) == {"a": 1, "b": 2, "c": 7}
    assert prompts.quotas({"a": 1 / 3, "b": 2 / 3}, 6) == {"a": 2, "b": 4}
    assert prompts.quotas({"a": 1.0, "b": 0.0}, 4) == {"a": 4, "b": 0}
    assert list(prompts.quotas({"b": 1, "a": 1}, 2)) == ["b", "a"]


def test_quotas_name_the_nearest_admissible_weights():
    with pytest.raises(ValueError, match=r"the nearest that do: a: 11/32, b: 21/32"):
        prompts.quotas({"a": 0.333, "b": 0.667}, 32)
    with pytest.raises(ValueError, match=r"a: 2/4, b: 1/4, c: 1/4"):
        prompts.quotas({"a": 1, "b": 1, "c": 1}, 4)
    for weights, count in [({}, 4), ({"a": -1, "b": 2}, 4), ({"a": 0}, 4), ({"a": 1}, 0)]:
        with pytest.raises(ValueError, match="weights must be at least 0"):
            prompts.quotas(weights, count)


def test_batches_keep_quota_and_domain_order():
    for batch in take(stream(), 10):
        assert [domain for domain, _ in batch] == ["a"] * 3 + ["b"] * 2


def test_every_epoch_holds_every_problem_once_in_a_new_order():
    drawn = [i for batch in take(stream(), 10) for domain, i in batch if domain == "a"]
    epochs = [drawn[i : i + 10] for i in range(0, 30, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_order_depends_on_seed_and_domain_only():
    assert take(stream(), 5) == take(stream(), 5)
    assert take(stream(seed=1), 5) != take(stream(), 5)
    same_size = take(stream((10, 10), (5, 5)), 2)
    a, b = ([i for batch in same_size for d, i in batch if d == domain] for domain in "ab")
    assert a != b
    # The other domain's quota does not move a domain.
    a_only = [i for batch in take(stream((10, 10), (5, 0)), 2) for _, i in batch]
    assert a_only == a


@pytest.mark.parametrize("done", [0, 1, 3, 4, 7])
def test_c16_resume_goes_on_exactly_across_epochs(done):
    # 3 of 10 a batch: batch 3 (counted from 0) straddles the end of the first epoch.
    whole = take(stream(), done + 6)
    first = stream()
    assert take(first, done) == whole[:done]
    state = json.loads(json.dumps(first.state()))
    resumed = stream()
    take(resumed, 2)
    resumed.restore(state)
    assert take(resumed, 6) == whole[done:]
    assert take(first, 6) == whole[done:]  # Taking the state changed nothing.
    # Control: without the state, data repeat.
    assert done == 0 or take(stream(), 6) != whole[done:]


def test_c16_state_does_not_change_afterwards():
    s = stream()
    state = s.state()
    frozen = json.dumps(state)
    take(s, 3)
    assert json.dumps(state) == frozen
    other = stream()
    other.restore(state)
    take(other, 3)
    assert json.dumps(state) == frozen


def test_c16_resume_with_another_quota_skips_and_repeats_nothing():
    first = stream((10, 7), (3, 2))
    drawn = [i for batch in take(first, 2) for d, i in batch if d == "a"]
    resumed = stream((10, 7), (4, 2))
    resumed.restore(first.state())
    drawn += [i for batch in take(resumed, 1) for d, i in batch if d == "a"]
    assert sorted(drawn) == list(range(10))


def test_c16_resume_on_other_data_is_refused():
    state = stream().state()
    with pytest.raises(ValueError, match="saved prompt stream has seed 0, this run has 1"):
        stream(seed=1).restore(state)
    with pytest.raises(ValueError, match=r"saved prompt stream has data .* same seed, domains"):
        stream((11, 7)).restore(state)
    edited = {"a": [problem(i, "a", prompt=f"{i}!") for i in range(10)],
              "b": [problem(i, "b") for i in range(7)]}  # fmt: skip
    with pytest.raises(ValueError, match="saved prompt stream has data"):
        prompts.PromptStream(edited, {"a": 3, "b": 2}, 0).restore(state)


def test_stream_refuses_what_it_cannot_serve():
    with pytest.raises(ValueError, match="domain 'b' has 7 problems, fewer than its 8"):
        stream(quota=(3, 8))
    with pytest.raises(ValueError, match=r"problems of \['a'\] but quotas of \['a', 'b'\]"):
        prompts.PromptStream({"a": [problem(1)]}, {"a": 1, "b": 1}, 0)


def test_prompts_are_left_padded_to_the_smallest_bucket():
    rows = [problem(7, "b", "12+3="), problem(7, "a", "9="), problem(8, "a", "1+1=")]
    batch = prompts.encode_prompts(rows, ["a", "b"], NANO, buckets=[16, 8, 6, 4])
    assert isinstance(batch, PromptBatch)
    expected = [[1, *NANO.encode(p.prompt)] for p in rows]
    np.testing.assert_array_equal(batch.length_P, [6, 3, 5])
    assert batch.tokens_PL.shape == (3, 6)
    for tokens_L, length, row in zip(batch.tokens_PL, batch.length_P, expected, strict=True):
        np.testing.assert_array_equal(tokens_L[6 - length :], row)
        assert set(tokens_L[: 6 - length]) <= {NANO.pad_id}
    np.testing.assert_array_equal(batch.domain_P, [1, 0, 0])
    np.testing.assert_array_equal(batch.stop_PS, [[2]] * 3)
    dtypes = [np.asarray(x).dtype.name for x in (batch.tokens_PL, batch.length_P, batch.domain_P,
                                                 batch.id_P, batch.stop_PS)]  # fmt: skip
    assert dtypes == ["int32", "int32", "int32", "uint32", "int32"]


def test_ids_differ_between_domains_and_not_between_batches():
    rows = [problem(i, d) for d in "ab" for i in range(100)]
    batch = prompts.encode_prompts(rows, ["a", "b"], NANO, buckets=[8])
    assert len(set(batch.id_P.tolist())) == 200
    again = prompts.encode_prompts(rows[::-1], ["b", "a"], NANO, buckets=[16])
    np.testing.assert_array_equal(again.id_P, batch.id_P[::-1])


def test_m03_padding_is_known_from_lengths_alone():
    batch = prompts.encode_prompts(
        [problem(1, prompt="5 2 6"), problem(2, prompt="2 2 5 2 6")],
        ["a"],
        fake_tokenizer(pad=2),
        buckets=[5],
    )
    np.testing.assert_array_equal(batch.tokens_PL, [[2, 2, 5, 2, 6]] * 2)
    np.testing.assert_array_equal(batch.length_P, [3, 5])
    by_length_PL = np.arange(5)[None, :] >= 5 - batch.length_P[:, None]
    np.testing.assert_array_equal(by_length_PL, [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    # Control: a mask made from token values would hide real tokens.
    assert not np.array_equal(batch.tokens_PL != 2, by_length_PL)


def test_m09_every_stop_id_reaches_the_batch():
    batch = prompts.encode_prompts(
        [problem(1, prompt="5"), problem(2, prompt="6")],
        ["a"],
        fake_tokenizer(stop=(9, 7)),
        buckets=[4],
    )
    np.testing.assert_array_equal(batch.stop_PS, [[9, 7], [9, 7]])


def test_m18_empty_prompt_is_bos_or_an_error():
    empty = problem(3, prompt="")
    batch = prompts.encode_prompts([empty], ["a"], NANO, buckets=[4])
    np.testing.assert_array_equal(batch.tokens_PL, [[0, 0, 0, 1]])
    np.testing.assert_array_equal(batch.length_P, [1])
    with pytest.raises(ValueError, match="problem 3 of 'a': the prompt is empty and the tokenizer"):
        prompts.encode_prompts([empty], ["a"], fake_tokenizer(bos=None), buckets=[4])


def test_bos_stands_once_even_if_the_text_spells_it():
    ids_once = prompts.prompt_tokens(problem(1, prompt="<s>1="), NANO)
    assert ids_once.count(NANO.bos_id) == 1
    assert NANO.decode(ids_once) == "<s>1="


def test_s04_over_long_prompts_are_dropped_with_a_count_or_an_error():
    rows = [problem(i, prompt="1 " * n) for i, n in enumerate((8, 12, 3))]
    kept, dropped = prompts.fit_prompts(rows, fake_tokenizer(), 8, "drop")
    assert ([p.id for p in kept], dropped) == ([0, 2], 1)
    with pytest.raises(
        ValueError, match="problem 1 of 'a': the prompt has 12 tokens, the limit is 8"
    ):
        prompts.fit_prompts(rows, fake_tokenizer(), 8, "error")
    with pytest.raises(ValueError, match="overflow='cut': one of error, drop"):
        prompts.fit_prompts(rows, fake_tokenizer(), 8, "cut")
    # A bos counts: eight tokens and a bos are nine.
    kept, dropped = prompts.fit_prompts(rows, fake_tokenizer(bos=1), 8, "drop")
    assert ([p.id for p in kept], dropped) == ([2], 2)
    assert prompts.encode_prompts(kept, ["a"], fake_tokenizer(), buckets=[8]).tokens_PL.shape == (
        1,
        8,
    )


def test_s04_a_prompt_over_all_buckets_is_never_cut():
    rows = [problem(0, prompt="1"), problem(1, prompt="1 " * 12)]
    with pytest.raises(ValueError, match=r"problem 1 .* has 12 tokens, the largest bucket is 8"):
        prompts.encode_prompts(rows, ["a"], fake_tokenizer(), buckets=[4, 8])


def test_encode_prompts_refuses_unknown_domains_and_nothing():
    with pytest.raises(ValueError, match=r"problems of \['b'\], but the domains are \['a'\]"):
        prompts.encode_prompts([problem(1, "b")], ["a"], NANO, buckets=[8])
    with pytest.raises(ValueError, match="no problems to encode"):
        prompts.encode_prompts([], ["a"], NANO, buckets=[8])


def test_solutions_end_in_a_stop_token():
    rows = [problem(1, terse="7"), problem(2, terse="12")]
    tokens_BR, length_B, whole_B = prompts.encode_solutions(rows, "terse", NANO, columns=4)
    one, two = NANO.encode("7"), NANO.encode("12")
    np.testing.assert_array_equal(tokens_BR, [[*one, 2, 0, 0], [*two, 2, 0]])
    np.testing.assert_array_equal(length_B, [2, 3])
    assert whole_B.all()
    assert (tokens_BR.dtype, length_B.dtype, whole_B.dtype) == (np.int32, np.int32, bool)
    several = prompts.encode_solutions(
        [problem(1, terse="5")], "terse", fake_tokenizer(stop=(9, 7)), 2
    )
    np.testing.assert_array_equal(several[0], [[5, 9]])


def test_solutions_that_do_not_serve_are_named():
    row = problem(2, terse="123")
    with pytest.raises(
        ValueError, match=r"problem 2 of 'a': its terse solution has 4 tokens .* 3 col"
    ):
        prompts.encode_solutions([row], "terse", NANO, columns=3)
    with pytest.raises(ValueError, match="no solution in style 'worked'; it has: terse"):
        prompts.encode_solutions([row], "worked", NANO, columns=8)


def test_a_domains_template_goes_around_every_problem():
    rows = [problem(1, prompt="2{prompt}+2"), problem(2, prompt="x")]
    filled = prompts.fill_template(rows, r"Q: {prompt} Put it in \boxed{}.")
    assert [p.prompt for p in filled] == [
        r"Q: 2{prompt}+2 Put it in \boxed{}.",
        r"Q: x Put it in \boxed{}.",
    ]
    assert [p.id for p in filled] == [1, 2]
    assert prompts.fill_template(rows, "{prompt}") == rows
