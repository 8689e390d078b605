"""What a model thinks of a text: its tokens' log-probabilities, and perplexity; bits per weight."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmdecode._checks import check_int, is_int, type_error
from lmdecode.decoder.causal_caches import CausalCaches
from lmdecode.decoder.decoding import PackedDecoding
from lmdecode.decoder.engine.request import TokenLogprob
from lmdecode.models.packed_causal import PackedCausalModel

__all__ = ["Perplexity", "bits_per_weight", "perplexity", "token_logprobs"]

_MOST_LOGITS = 1 << 24  # that are held at a time: 64 MB
_MOST_ROWS = 512  # tokens of a step


class Perplexity(NamedTuple):
    """Perplexity of a model on a text: e to the mean loss of the scored tokens.

    ``standard_error`` is that of ``perplexity`` if the scored tokens were independent. ``scored``
    and ``read`` count tokens. ``tokens_per_second`` is the speed of reading, with the logits of the
    scored tokens, and without the first of several windows.
    """

    perplexity: float
    standard_error: float
    scored: int
    read: int
    tokens_per_second: float


def _causal(op: str, decoding: PackedDecoding) -> PackedCausalModel:
    if not isinstance(decoding, PackedDecoding):
        raise type_error(op, "decoding", decoding, "a Decoding")
    if not isinstance(decoding.decoder, PackedCausalModel):
        raise ValueError(
            f"{op}: decoding has a {type(decoding.decoder).__name__}; expected a decoder-only "
            "model, which foretells a text"
        )
    return decoding.decoder


def _checked_ids(op: str, ids: Any, least: int, expected: str, vocab: int) -> Tensor:
    """Return the tokens of a text as int64."""
    if not isinstance(ids, Tensor):
        raise type_error(op, "ids", ids, "a tensor or a sequence of ints")
    if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(
            f"{op}: ids has shape {list(ids.shape)} and dtype {ids.dtype}; expected [n] of integers"
        )
    if len(ids) < least:
        raise ValueError(f"{op}: ids has {len(ids)} tokens; expected at least {expected}")
    ids = ids.to("cpu", torch.int64)
    _check_range(op, int(ids.min()), int(ids.max()), vocab)
    return ids


def _check_range(op: str, low: int, high: int, vocab: int) -> None:
    if low < 0 or high >= vocab:
        raise ValueError(f"{op}: ids are {low} to {high}; expected 0 to {vocab - 1}")


def _logits(
    caches: CausalCaches, ids: Tensor, first: int
) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Read a text from its beginning, in parts.

    Yield the logits [n, V] at ``first`` and the places behind it, the tokens [n] that come behind
    these, and the seconds of reading.
    """
    rows, last = max(1, _MOST_LOGITS // caches.model.config.vocab_size), len(ids) - 1
    caches.truncate([0], [0])
    at, seconds = 0, 0.0
    for end in [first, *range(first + rows, last, rows), last]:
        count, wanted = end - at, end - at if at >= first else 0
        if not count:
            continue
        start = time.perf_counter()
        entries = torch.tensor([[0, count, 1, wanted]], device="cpu")
        logits = caches.forward(ids[at:end], entries, wanted)
        seconds += time.perf_counter() - start
        if wanted:
            yield logits, ids[at + 1 : end + 1], seconds
            seconds = 0.0
        at = end


@torch.no_grad()
def token_logprobs(
    decoding: PackedDecoding, ids: Tensor | Sequence[int], num_top: int = 0
) -> list[TokenLogprob]:
    """Return the log-probability of each token of a text [n], n >= 1, after the tokens before it.

    Each of the n items has the ``num_top`` most probable tokens at its place. The first has nothing
    before it: NaN, without other tokens. The model must be decoder-only. Raises RuntimeError if the
    logits have NaN.
    """
    op = "token_logprobs"
    model = _causal(op, decoding)
    vocab, most = model.config.vocab_size, model.max_positions or 1 << 30
    if isinstance(ids, Sequence) and all(map(is_int, ids)):
        _check_range(op, min(ids, default=0), max(ids, default=0), vocab)
        ids = torch.tensor(ids, dtype=torch.int64, device="cpu")
    tokens = _checked_ids(op, ids, 1, "one", vocab)
    if len(tokens) > most:
        raise ValueError(f"{op}: ids has {len(tokens)} tokens; expected at most {most}")
    num_top = check_int(op, "num_top", num_top, 0, vocab)
    rows = min(len(tokens), _MOST_ROWS)
    caches = CausalCaches(model, 1, len(tokens), dtype=decoding.cache_dtype, max_rows=rows)
    found = [TokenLogprob(int(tokens[0]), math.nan, ())]
    for logits, targets, _ in _logits(caches, tokens, 0):
        every = logits.log_softmax(-1)
        of_targets = every.gather(1, targets[:, None])[:, 0].tolist()
        if any(map(math.isnan, of_targets)):
            raise RuntimeError(f"{op}: the logits have NaN")
        best = every.topk(num_top)
        tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        found += [
            TokenLogprob(token, logprob, tuple(zip(*top, strict=True)))
            for token, logprob, top in zip(targets.tolist(), of_targets, tops, strict=True)
        ]
    return found


@torch.no_grad()
def perplexity(
    decoding: PackedDecoding,
    ids: Tensor,
    window: int = 512,
    *,
    bos: int | None = None,
    on_tokens: Callable[[int], object] | None = None,
) -> Perplexity:
    """Return the perplexity of a text, integers [n], as ``llama-perplexity`` computes it.

    The text is cut into windows of ``window`` tokens, at least 4, that are read independently; a
    shorter rest is not read. The tokens from position ``window // 2 + 1`` of a window on are
    scored. ``ids`` begin with the token that the tokenizer puts in front of a text, if it does;
    ``bos`` is that token, which replaces the first token of each window (None: nothing is
    replaced). ``on_tokens`` is called with the number of tokens of each window after it was read.
    The model must be decoder-only.
    """
    op = "perplexity"
    model = _causal(op, decoding)
    most = model.max_positions or 1 << 30
    window = check_int(op, "window", window, 4, most, limits=f"4 to {most}")
    vocab = model.config.vocab_size
    ids = _checked_ids(op, ids, window, f"{window}, a window", vocab)
    if bos is not None and not (is_int(bos) and 0 <= bos < vocab):
        raise ValueError(f"{op}: bos is {bos!r}; expected None or a token, 0 to {vocab - 1}")
    windows = ids[: len(ids) // window * window].view(-1, window)
    if bos is not None:
        windows = windows.clone()
        windows[:, 0] = bos
    caches = CausalCaches(model, 1, window, dtype=decoding.cache_dtype, max_rows=window)
    losses, seconds = [], list[float]()
    for tokens in windows:
        seconds.append(0.0)
        # The token after the middle one is the first that is scored.
        for logits, targets, took in _logits(caches, tokens, window // 2):
            losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
            seconds[-1] += took
        if on_tokens is not None:
            on_tokens(window)
    timed = seconds[1:] or seconds
    every = torch.cat(losses).double()
    value = math.exp(every.mean())
    error = value * float(every.std()) / math.sqrt(len(every)) if len(every) > 1 else math.nan
    # The last token of a window is scored, and never read.
    rate = (window - 1) * len(timed) / sum(timed)
    return Perplexity(value, error, len(every), windows.numel(), rate)


def bits_per_weight(decoding: PackedDecoding) -> float:
    """Return the bits per weight of a decoder-only model's packed linear layers.

    Scales and padding count. The head is among the layers, and an embedding that is packed as it;
    other embeddings and norms are not.
    """
    model = _causal("bits_per_weight", decoding)
    return 8 * sum(size for _, size in model.packed_parts()) / model.packed_numel
