"""A grammar of xgrammar as a logits processor; ``sample`` passes its mask to the fused op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessor

from lmdecode._checks import install_hint


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
