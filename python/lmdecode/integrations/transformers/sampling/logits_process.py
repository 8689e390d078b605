"""Logits processors that ``sample`` hands to an op: the four filters in one, and grammars."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessor

from lmdecode._checks import install_hint, is_int, is_real
from lmdecode.generation_options import FUSED
from lmdecode.sampling.ops import top_k_top_p_sample
from lmdecode.sampling.types import STATUS_NAN

_OP_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_RESULT_DTYPES = (*_OP_DTYPES, torch.float64)  # -inf is one of their values


def as_op_logits(scores: torch.Tensor) -> torch.Tensor:
    """Return ``scores``, converted to float32 if the op does not read their dtype."""
    return scores if scores.dtype in _OP_DTYPES else scores.to(torch.float32)


@functools.lru_cache(maxsize=64)
def is_valid_temperature(temperature: float) -> bool:
    """Tell whether a temperature is positive and finite in float32, in which the op divides."""
    rounded = torch.tensor(temperature, dtype=torch.float64, device="cpu").to(torch.float32).item()
    return 0.0 < rounded < math.inf


def _check_probability(name: str, value: float | None) -> None:
    if value is not None and not (is_real(value) and 0 <= value <= 1):
        raise ValueError(f"{name}: expected a number from 0 to 1 or None, got {value!r}")


class TopKTopPLogitsProcessor(LogitsProcessor):
    """Temperature, top-k, top-p and min-p in one pass over the scores.

    Returns what ``TemperatureLogitsWarper``, ``TopKLogitsWarper``, ``TopPLogitsWarper`` and
    ``MinPLogitsWarper`` of transformers return when they are applied in this order to
    ``scores.float()``, in the dtype of ``scores``: every value tied with the k-th one is kept, kept
    scores are divided by the temperature, the others are -inf. transformers adds up probabilities
    in floating point; a token at which the exact sum lies within 1e-6 of ``top_p`` (or its
    probability within 1e-6 of the ``min_p`` bound, relatively) may be kept by one and dropped by
    the other.

    It keeps no state, reads no ``input_ids``, treats every row by itself and never waits for the
    device, hence ``supports_continuous_batching``; its parameters hold for all requests of a batch.

    Parameters
    ----------
    top_k
        int >= 1: keep the k largest scores. None, or k >= V: no such filter.
    top_p
        float in [0, 1]: keep the most probable tokens up to and with the one at which their
        probability reaches ``top_p``; 0 keeps one token. None or 1: no such filter.
    min_p
        float in [0, 1]: keep tokens whose probability is at least ``min_p`` times that of the most
        probable one. None: no such filter.
    temperature
        float > 0 that the scores are divided by. None: 1.

    Raises
    ------
    ValueError
        If an argument is of another type or out of its range.

    Examples
    --------
    >>> processor = TopKTopPLogitsProcessor(top_k=50, top_p=0.9)
    >>> model.generate(**inputs, do_sample=True, top_k=0, logits_processor=[processor])
    """

    supports_continuous_batching = True

    def __init__(
        self,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        temperature: float | None = None,
    ) -> None:
        if top_k is not None and not (is_int(top_k) and int(top_k) > 0):
            raise ValueError(f"top_k: expected an int >= 1 or None, got {top_k!r}")
        _check_probability("top_p", top_p)
        _check_probability("min_p", min_p)
        if temperature is not None and not (
            is_real(temperature) and is_valid_temperature(temperature)
        ):
            raise ValueError(
                "temperature: expected a number that is > 0 and finite in float32, or None, "
                f"got {temperature!r}"
            )
        self.top_k = None if top_k is None else int(top_k)
        self.top_p = None if top_p is None else float(top_p)
        self.min_p = None if min_p is None else float(min_p)
        self.temperature = None if temperature is None else float(temperature)

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value}" for name, value in self.stages().items())
        return f"{type(self).__name__}({arguments})"

    def stages(self) -> dict[str, Any]:
        """Return the stages that are on, as keyword arguments of ``top_k_top_p_sample``."""
        values = {name: getattr(self, name) for name in FUSED}
        return {name: value for name, value in values.items() if value is not None}

    def __call__(self, input_ids: torch.LongTensor | None, scores: torch.Tensor) -> torch.Tensor:
        """Return filtered scores, a new [B, V] tensor of their dtype; ``input_ids`` is unused.

        Filters and the division compute in float32, and the result is rounded once. The result is
        float32 for dtypes other than float16, bfloat16, float32 and float64, which may have no
        -inf. A row with NaN has NaN in its first entry, so its softmax is NaN, as after the
        warpers, and sampling from it fails. Raises ValueError if ``scores`` is not [B, V].
        """
        filtered = top_k_top_p_sample(
            as_op_logits(scores), **self.stages(), greedy=True, return_logits=True,
            dialect="transformers",
        )  # fmt: skip
        kept_logits = filtered.kept_logits
        assert kept_logits is not None  # it was asked for
        has_nan = (filtered.status & STATUS_NAN).to(torch.bool)
        kept_logits[:, 0].masked_fill_(has_nan, math.nan)
        return kept_logits.to(scores.dtype) if scores.dtype in _RESULT_DTYPES else kept_logits


# --- Grammars -------------------------------------------------------------------------------------


class GrammarLogitsProcessor(LogitsProcessor):
    """Allow only the tokens of a grammar, by the bit mask of xgrammar.

    ``generate(custom_generate=sample, logits_processor=[GrammarLogitsProcessor(grammar)])`` gives
    the bit mask, V / 8 bytes a row, to the op that samples; no logits are masked in memory. Any
    other ``generate()`` calls it as a logits processor. The grammar begins after the prompt. Its
    state follows ``input_ids``: if these are not the tokens of the last call and one more, a new
    text begins.

    xgrammar takes every token that has a text for text, in strings too: name the model's end tokens
    as ``stop_token_ids``, and suppress its other special ones, as below.

    Needs the package ``xgrammar`` (``pip install "lmdecode[grammar]"``).

    Parameters
    ----------
    grammar
        ``xgrammar.CompiledGrammar``, for all rows, or a list of one for each row.

    Raises
    ------
    TypeError
        If ``grammar`` has another type.

    Examples
    --------
    >>> ends = model.generation_config.eos_token_id
    >>> ends = ends if isinstance(ends, list) else [ends]
    >>> added = tokenizer.added_tokens_decoder.items()
    >>> others = [id for id, token in added if token.special and id not in ends]
    >>> info = xgrammar.TokenizerInfo.from_huggingface(
    ...     tokenizer, vocab_size=model.config.vocab_size, stop_token_ids=ends
    ... )
    >>> grammar = xgrammar.GrammarCompiler(info).compile_json_schema(schema)
    >>> model.generate(
    ...     **inputs,
    ...     suppress_tokens=others or None,
    ...     logits_processor=[GrammarLogitsProcessor(grammar)],
    ...     custom_generate=sample,
    ... )
    """

    def __init__(self, grammar: Any) -> None:
        try:
            import xgrammar
        except ImportError as error:
            raise ImportError(
                f"GrammarLogitsProcessor needs xgrammar: {install_hint('grammar')}"
            ) from error

        is_list = isinstance(grammar, Sequence) and not isinstance(grammar, str)
        grammars = list(grammar) if is_list else [grammar]
        for i, one in enumerate(grammars):
            if not isinstance(one, xgrammar.CompiledGrammar):
                raise TypeError(
                    f"GrammarLogitsProcessor: grammar[{i}] is of type {type(one).__name__}; "
                    "expected an xgrammar.CompiledGrammar"
                )
        self._grammars, self._is_list = grammars, is_list
        self._matchers: list[Any] = []
        self._open: list[bool] = []  # rows whose text still matches the grammar
        self._seen: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None

    def bitmask(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the mask of the tokens that may come next.

        Parameters
        ----------
        input_ids
            [B, S] int64: first the prompts, then one token more in each call. The same tokens again
            give the same mask.

        Returns
        -------
        torch.Tensor
            [B, ceil(V / 32)] int32 on the CPU, V of the grammar's tokenizer: bit t % 32 of word
            t // 32 is set where token t is allowed. The next call overwrites it. All bits of a row
            are set once its text is complete, or has a token that the grammar forbids, such as
            padding.

        Raises
        ------
        ValueError
            If there are several grammars, but not one for each row.
        """
        input_ids = input_ids.cpu()
        seen = self._seen
        if seen is not None and self._mask is not None and torch.equal(seen, input_ids):
            return self._mask
        if (
            seen is not None
            and input_ids.shape == (seen.shape[0], seen.shape[1] + 1)
            and torch.equal(input_ids[:, :-1], seen)
        ):
            for row, token in enumerate(input_ids[:, -1].tolist()):
                if self._open[row]:
                    matcher = self._matchers[row]
                    self._open[row] = matcher.accept_token(token) and not matcher.is_terminated()
        else:
            self._begin(input_ids.shape[0])
        self._seen = input_ids.clone()
        assert self._mask is not None  # _begin makes it
        self._mask.fill_(-1)
        for row, matcher in enumerate(self._matchers):
            if self._open[row]:
                matcher.fill_next_token_bitmask(self._mask, row)
        return self._mask

    def _begin(self, batch: int) -> None:
        import xgrammar

        if self._is_list and len(self._grammars) != batch:
            raise ValueError(
                f"GrammarLogitsProcessor: expected one grammar, or one for each of {batch} rows; "
                f"got {len(self._grammars)}"
            )
        grammars = self._grammars if self._is_list else self._grammars * batch
        self._matchers = [xgrammar.GrammarMatcher(grammar) for grammar in grammars]
        self._open = [True] * batch
        vocab = max((grammar.tokenizer_info.vocab_size for grammar in self._grammars), default=0)
        self._mask = xgrammar.allocate_token_bitmask(batch, vocab)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return ``scores`` [B, V], -inf where the grammar forbids the token: a new tensor."""
        mask = fitting_mask(self.bitmask(input_ids), scores.shape[-1]).to(scores.device)
        bits = mask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=scores.device)
        allowed = (bits & 1).bool().flatten(1)[:, : scores.shape[-1]]
        return scores.masked_fill(~allowed, -torch.inf)


def fitting_mask(mask: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return a bit mask [B, words] for ``vocab`` logits; logits after its end are forbidden."""
    words = (vocab + 31) // 32
    return torch.nn.functional.pad(mask, (0, words - mask.shape[1])).contiguous()
