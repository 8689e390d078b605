"""Vectors of texts, and the logits behind them: many short texts are read at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmdecode._checks import check_bool, check_choice, check_int, is_int, is_list, type_error
from lmdecode.decoder.causal_caches import CausalCaches
from lmdecode.linear.packed_linear import rms_norm
from lmdecode.models.packed_causal import PackedCausalModel

__all__ = ["check_pooling_of_files", "embedded", "last_logits"]

_MOST_ROWS = 512  # tokens that are read at once
_MOST_TEXTS = 64  # of these
_LEAST_SHARED = 32  # tokens: with fewer, to read them once saves less than it costs
_POOLINGS = ("last", "mean")
_TINY = 1e-30  # beside mean squares: a vector of zeros stays one


class _Part(NamedTuple):
    """Tokens ``begin`` to ``end`` of a text, which is as long as that if it ``is_last``."""

    text: int
    begin: int
    end: int
    is_last: bool


def _steps(lengths: Sequence[int]) -> Iterator[list[_Part]]:
    """Yield the parts that are read at once: of many short texts, or of a long one."""
    step, rows = list[_Part](), 0
    for text, length in enumerate(lengths):
        if step and (rows + length > _MOST_ROWS or len(step) == _MOST_TEXTS):
            yield step
            step, rows = [], 0
        if length <= _MOST_ROWS:
            step.append(_Part(text, 0, length, True))
            rows += length
            continue
        for at in range(0, length, _MOST_ROWS):
            end = min(length, at + _MOST_ROWS)
            yield [_Part(text, at, end, end == length)]
    if step:
        yield step


def _checked_texts(op: str, name: str, texts: Any, model: PackedCausalModel) -> list[list[int]]:
    """Return texts that are lists of tokens; raises ValueError or TypeError that has the index."""
    vocab, most = model.config.vocab_size, model.max_positions or 1 << 30
    if not is_list(texts):
        raise type_error(op, name, texts, "a list of lists of tokens")
    for i, text in enumerate(texts):
        if not is_list(text) or not all(map(is_int, text)):
            raise type_error(op, f"{name}[{i}]", text, "a list of tokens")
        if not 1 <= len(text) <= most:
            raise ValueError(f"{op}: {name}[{i}] has {len(text)} tokens; expected 1 to {most}")
        if min(text) < 0 or max(text) >= vocab:
            raise ValueError(
                f"{op}: {name}[{i}] has tokens {min(text)} to {max(text)}; expected 0 to "
                f"{vocab - 1}"
            )
    return [list(text) for text in texts]


def _read(
    model: PackedCausalModel,
    cache_dtype: str,
    texts: Sequence[Sequence[int]],
    *,
    shared: int = 0,
    wants_logits: bool = False,
) -> Iterator[tuple[list[_Part], Tensor]]:
    """Read texts; yield parts, and the rows of the final norm [tokens, model_size] for them.

    With ``wants_logits`` it is, instead, the logits [parts that are last, V] behind texts. The
    first ``shared`` tokens, the same ones of all texts, are read once, and are in no part.
    """
    lengths, size = [len(text) - shared for text in texts], model.config.model_size
    steps = list(_steps(lengths))
    rows = max((sum(p.end - p.begin for p in step) for step in steps), default=1)
    rows = max(rows, min(shared, _MOST_ROWS))

    def new_caches(places: int, longest: int) -> CausalCaches:
        # The first place has what is shared, from which the others go on.
        most = shared + longest
        return CausalCaches(model, 1 + places, most, dtype=cache_dtype, max_rows=rows)

    def forward(
        caches: CausalCaches, tokens: Sequence[int], entries: list[list[int]], hidden: Tensor | None
    ) -> Tensor:
        return caches.forward(
            torch.tensor(tokens, dtype=torch.int64, device="cpu"),
            torch.tensor(entries, dtype=torch.int64, device="cpu"),
            sum(entry[3] for entry in entries),
            hidden_out=hidden,
        )

    # Places for the many are as long as a step; a long text has the one place of other caches.
    short = new_caches(max(map(len, steps), default=1), rows)
    long = new_caches(1, max(lengths)) if max(lengths, default=0) > _MOST_ROWS else short
    for step in steps:
        caches = long if lengths[step[0].text] > _MOST_ROWS else short
        if step[0].begin == 0:
            if shared and not caches.lengths[0]:
                forward(caches, texts[0][:shared], [[0, shared, 1, 0]], None)
            caches.reorder(torch.zeros(caches.sequences, dtype=torch.int64, device="cpu"))
        tokens = [t for p in step for t in texts[p.text][shared + p.begin : shared + p.end]]
        entries = [
            [place, p.end - p.begin, 1, int(wants_logits and p.is_last)]
            for place, p in enumerate(step, 1)
        ]
        hidden = None
        if not wants_logits:
            hidden = torch.empty((len(tokens), size), dtype=torch.float32, device="cpu")
        logits = forward(caches, tokens, entries, hidden)
        yield step, logits if hidden is None else hidden


def check_pooling_of_files(op: str, word: str) -> str:
    """Return how a model's files say that vectors are made; raises ValueError for other ways."""
    if word not in _POOLINGS:
        raise ValueError(
            f"{op}: pooling is None, and the model's files say {word!r}; expected 'last' or 'mean'"
        )
    return word


@torch.no_grad()
def embedded(
    op: str,
    model: PackedCausalModel,
    cache_dtype: str,
    texts: Any,
    *,
    pooling: str = "last",
    normalize: bool = True,
    dimensions: int | None = None,
) -> Tensor:
    """Return the vectors of lists of tokens, as ``Decoding.embed`` describes them."""
    texts, size = _checked_texts(op, "texts", texts, model), model.config.model_size
    check_choice(op, "pooling", pooling, _POOLINGS)
    check_bool(op, "normalize", normalize)
    width = size if dimensions is None else check_int(op, "dimensions", dimensions, 1, size)
    vectors = torch.zeros((len(texts), size), dtype=torch.float64, device="cpu")
    for step, hidden in _read(model, cache_dtype, texts):
        counts = torch.tensor([p.end - p.begin for p in step], device="cpu")
        if pooling == "mean":
            of_rows = torch.tensor([p.text for p in step], device="cpu").repeat_interleave(counts)
            vectors.index_add_(0, of_rows, hidden.double())  # row after row, in any batch
        else:
            vectors[[p.text for p in step]] = hidden[counts.cumsum(0) - 1].double()
    if pooling == "mean":
        lengths = [len(text) for text in texts]
        vectors /= torch.tensor(lengths, dtype=torch.float64, device="cpu")[:, None]
    found = vectors[:, :width].float()
    if not bool(found.isfinite().all()):
        raise RuntimeError(f"{op}: the model's features have NaN or infinities")
    if normalize:  # a sum of squares by torch would depend on threads
        scale = torch.full((width,), width**-0.5, dtype=torch.float32, device="cpu")
        found = rms_norm(found, scale, eps=_TINY)
    return found


@torch.no_grad()
def last_logits(
    model: PackedCausalModel,
    cache_dtype: str,
    texts: Sequence[Sequence[int]],
    tokens: Sequence[int],
) -> Tensor:
    """Return the logits of some tokens behind each text: float32 [texts, tokens].

    Tokens that all texts begin with are read once.
    """
    alike = itertools.takewhile(lambda row: len(set(row)) == 1, zip(*texts, strict=False))
    shared = min(len(list(alike)), min(map(len, texts)) - 1)
    shared = shared if len(texts) > 1 and shared >= _LEAST_SHARED else 0
    read = _read(model, cache_dtype, texts, shared=shared, wants_logits=True)
    found = [logits[:, list(tokens)] for step, logits in read if step[-1].is_last]
    return torch.cat(found)
