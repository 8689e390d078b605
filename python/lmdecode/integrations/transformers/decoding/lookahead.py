"""Prompt lookup: a step reads draft tokens ahead, before they are chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from lmdecode.decoder.causal_caches import CausalCaches
from lmdecode.integrations.transformers.sampling.read_ahead import ReadAhead, next_size
from lmdecode.sampling.drafts import prompt_lookup

__all__ = ["Lookahead"]


class Lookahead:
    """The logits at the last tokens of several sequences, some computed ahead.

    A step of a sequence reads its last token and the draft of ``prompt_lookup`` after it. While the
    chosen tokens equal the draft, their logits are already computed, with the bits of steps of one
    token. Rejected tokens are removed from the caches, and the next step reads fewer tokens ahead.

    Parameters
    ----------
    caches : CausalCaches
        They have read the prompts, and can go back ``num_tokens``.
    prompts : list of Tensor
        [n] int64 each.
    num_tokens, max_ngram : int
        See ``prompt_lookup``.
    """

    def __init__(
        self, caches: CausalCaches, prompts: list[Tensor], num_tokens: int, max_ngram: int
    ) -> None:
        self._caches, self._num_tokens, self._max_ngram = caches, num_tokens, max_ngram
        self._texts = torch.full((len(prompts), caches.max_length + 1), -1)
        self._lengths = torch.tensor([len(prompt) for prompt in prompts])
        for text, prompt in zip(self._texts, prompts, strict=True):
            text[: len(prompt)] = prompt
        # Of each sequence: the tokens read ahead, and the logits at the last token and at each of
        # them.
        self._ahead = [ReadAhead() for _ in prompts]
        self._propose = [num_tokens] * len(prompts)  # maximum number of tokens of the next draft
        self._logits: list[Tensor] = [torch.empty(0, 0) for _ in prompts]

    def logits(self, last: Tensor) -> Tensor:
        """Return the logits, [rows, V], at the chosen tokens, [rows] int64."""
        rows = torch.arange(len(last))
        self._texts[rows, self._lengths] = last
        self._lengths += 1
        to_read = []
        for row, token in enumerate(last.tolist()):
            if self._ahead[row].takes(token):
                self._logits[row] = self._logits[row][1:]
            else:
                to_read.append(row)
        if to_read:
            self._read(to_read)
        if len(last) == 1:
            return self._logits[0][:1]
        return torch.stack([logits[0] for logits in self._logits])

    def _read(self, rows: list[int]) -> None:
        lengths = self._lengths[rows]
        behind = (lengths - 1).tolist()  # accepted positions
        self._caches.truncate(rows, behind)
        for row in rows:
            if self._ahead[row].num_read:
                self._propose[row] = next_size(self._num_tokens, self._ahead[row].num_right)
        most = max(self._propose[row] for row in rows)
        proposed = prompt_lookup(self._texts[rows], most, self._max_ngram, lengths=lengths)
        tokens, entries = [], []
        for row, have, draft in zip(rows, behind, proposed.tolist(), strict=True):
            room = max(0, self._caches.max_length - have - 2)  # the last token is not read
            draft = [token for token in draft[: min(room, self._propose[row])] if token >= 0]
            self._ahead[row].begin(draft)
            tokens += [int(self._texts[row, have]), *draft]
            entries.append([row, 1 + len(draft), 0, 1 + len(draft)])
        logits = self._caches.forward(torch.tensor(tokens), torch.tensor(entries), len(tokens))
        parts = logits.split([entry[1] for entry in entries])
        for row, part in zip(rows, parts, strict=True):
            self._logits[row] = part
