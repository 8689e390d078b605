"""Drafts by multi-token prediction: by a layer that a model has for it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmdecode.decoder.causal_caches import CausalCaches
from lmdecode.decoder.causal_weights import PackedCausalModel
from lmdecode.decoder.engine.draft_rows import (
    ChosenDrafts,
    DraftedText,
    DraftRows,
    drafts_of,
)
from lmdecode.decoder.engine.drafts import DraftAsk, HiddenRows
from lmdecode.sampling.sampler_rows import RowRules

__all__ = ["Mtp", "MtpDrafts"]


@dataclass(frozen=True)
class Mtp(ChosenDrafts):
    """Settings of drafts by multi-token prediction, a ``Drafting``.

    ``model`` is the ``mtp`` of the model that is drafted for.
    """

    model: PackedCausalModel

    def new_source(
        self, *, rows: int, capacity: int, dialect: str, max_step_tokens: int
    ) -> MtpDrafts:
        """See ``Drafting``."""
        return MtpDrafts(self, rows, capacity, dialect, max_step_tokens)


class _Row:
    """The pairs that the layer has read of a row: a token, and the hidden row of the token before.

    ``read`` is the number of pairs in its caches, without those of a draft; ``position`` the known
    number of prompt tokens that the model has read. ``gap`` is how many of these have no pair, as
    they were read elsewhere. ``hidden``, [n, D], are the hidden rows of the last tokens, while
    their next tokens are not known yet.
    """

    def __init__(self) -> None:
        self.read = self.position = self.gap = 0
        self.hidden = torch.empty(0, 0, device="cpu", dtype=torch.float32)


class _Text(DraftedText):
    """A text: ``row`` is its row, and ``own`` the last hidden row of its draft, [1, D]."""

    def __init__(self, row: int, ends: Collection[int], size: int) -> None:
        super().__init__(ends, size)
        self.row = row
        self.own = torch.empty(0, 0, device="cpu", dtype=torch.float32)


class MtpDrafts:
    """A ``HiddenSource``: tokens that a layer predicts from the model's hidden rows.

    For accepted tokens it reads the model's hidden rows, for tokens of a draft its own. A text has
    at most ``capacity`` tokens; the model reads at most ``max_step_tokens`` in a step.
    """

    def __init__(
        self, settings: Mtp, rows: int, capacity: int, dialect: str, max_step_tokens: int
    ) -> None:
        self._settings, config = settings, settings.model.config
        self._caches = CausalCaches(settings.model, rows, capacity, max_rows=max_step_tokens)
        self._size = config.model_size
        self._rows = [_Row() for _ in range(rows)]
        self._sampled: DraftRows[_Text] = DraftRows(settings, rows, config.vocab_size, dialect)
        self._texts: dict[int, _Text] = {}

    def begin(
        self, row: int, prompt: Sequence[int], rules: RowRules, ends: Collection[int]
    ) -> None:
        """See ``DraftSource``."""
        text = self._texts[row] = _Text(row, ends, self._settings.num_tokens)
        self._sampled.begin(text, prompt, rules)

    def end(self, row: int) -> None:
        """See ``DraftSource``. What was read of the prompt stays, for ``share``."""
        if (text := self._texts.pop(row, None)) is not None:
            self._sampled.end(text)

    def share(self, row: int, of: int, length: int) -> None:
        """See ``HiddenSource``."""
        to, source = self._rows[row], self._rows[of]
        if row != of:
            parents = torch.arange(len(self._rows), device="cpu")
            parents[row] = of
            self._caches.reorder(parents)
        to.read = max(0, min(source.read, length - 1 - source.gap))
        self._caches.truncate([row], [to.read])
        to.position, to.gap, to.hidden = length, source.gap, self._nothing()

    def observe(self, steps: Sequence[HiddenRows]) -> None:
        """See ``HiddenSource``."""
        pairs: list[tuple[int, list[int], list[Tensor]]] = []
        for row, begin, tokens, hidden in steps:
            found = self._rows[row]
            if begin < 0:
                found.hidden = hidden
                continue
            is_known = begin == found.position and found.read == int(self._caches.lengths[row])
            if begin == 0 or not is_known:
                found.read, found.hidden = 0, self._nothing()
                self._caches.truncate([row], [0])
            # The first token has a pair only if the hidden row before it is known.
            before = found.hidden[-1:]
            pairs.append((row, list(tokens[1 - len(before) :]), [before, hidden[:-1]]))
            found.position, found.hidden = begin + len(tokens), hidden[-1:].clone()
        self._read([pair for pair in pairs if pair[1]], is_prompt=True)
        for row, *_ in pairs:
            self._rows[row].gap = self._rows[row].position - 1 - self._rows[row].read

    def propose(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        """See ``DraftSource``."""
        pairs: list[tuple[int, list[int], list[Tensor]]] = []
        rooms: dict[_Text, int] = {}
        for row, new, room in asks:
            text, found = self._texts.get(row), self._rows[row]
            if text is None or not new:
                continue
            if self._sampled.has_ended(text, new):
                self.end(row)
                continue
            self._sampled.take(text, new)
            if len(new) <= len(found.hidden):
                pairs.append((row, new, [found.hidden[: len(new)]]))
                rooms[text] = min(room, text.size)
            found.hidden = self._nothing()
        if pairs:
            self._caches.truncate(
                [row for row, *_ in pairs], [self._rows[row].read for row, *_ in pairs]
            )
            wanted = {text.row for text in rooms if rooms[text] > 0}
            first = self._read(pairs, is_prompt=False, wanted=wanted)
            self._sampled.draft(rooms, lambda texts: self._logits(texts, first))
        return drafts_of(self._texts, asks)

    def _nothing(self) -> Tensor:
        return torch.empty(0, self._size, device="cpu", dtype=torch.float32)

    def _read(
        self,
        pairs: Sequence[tuple[int, list[int], list[Tensor]]],
        *,
        is_prompt: bool,
        wanted: Collection[int] = (),
    ) -> dict[int, Tensor]:
        """Read pairs of rows; return the logits, [V], after the last ones of the wanted rows."""
        if not pairs:
            return {}
        ids = [token for _, tokens, _ in pairs for token in tokens]
        entries = [
            (row, len(tokens), int(is_prompt), int(row in wanted)) for row, tokens, _ in pairs
        ]
        hidden = torch.cat([part for *_, parts in pairs for part in parts])
        logits, out = self._forward(ids, entries, hidden)
        at, found = -1, iter(logits)
        for row, tokens, _ in pairs:
            self._rows[row].read += len(tokens)
            at += len(tokens)
            if row in self._texts:
                self._texts[row].own = out[at : at + 1]
        return {row: next(found) for row, *_ in pairs if row in wanted}

    def _forward(
        self, ids: list[int], entries: list[tuple[int, int, int, int]], hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(hidden)
        logits = self._caches.forward(
            torch.tensor(ids, device="cpu"),
            torch.tensor(entries, dtype=torch.int64, device="cpu"),
            sum(entry[3] for entry in entries),
            hidden_in=hidden,
            hidden_out=out,
        )
        return logits, out

    def _logits(self, texts: list[_Text], first: dict[int, Tensor]) -> Tensor:
        """Return the logits after the drafts of texts; ``first``: of texts without a draft."""
        if not texts[0].draft:  # so have all others, which go on together
            return torch.stack([first[text.row] for text in texts])
        hidden = torch.cat([text.own for text in texts])
        entries = [(text.row, 1, 0, 1) for text in texts]
        logits, out = self._forward([text.draft[-1] for text in texts], entries, hidden)
        for i, text in enumerate(texts):
            text.own = out[i : i + 1]
        return logits
