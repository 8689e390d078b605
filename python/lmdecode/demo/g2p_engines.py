"""The engines that the demo of pronunciation compares: each the same beam search."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

import lmdecode

__all__ = ["Engine", "Found", "ctranslate2_engine", "our_engine", "transformers_engine"]


class Found(NamedTuple):
    """A hypothesis.

    Attributes
    ----------
    tokens
        Without start and end.
    score
        Mean log-probability of a token, the end counted; 0 in greedy search, which has none.
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
