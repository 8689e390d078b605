"""The ``Sampler`` of a ``generate()`` call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmdecode.integrations.transformers.sampling.grammar import fitting_mask
from lmdecode.integrations.transformers.sampling.sampler_arguments import BANNED, CallRows
from lmdecode.sampling.sampler import Sampler
from lmdecode.sampling.types import SamplerOutput


def sampler_parameters(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a ``Sampler``, which depend on a row's text only."""
    parameters = {
        name: value
        for name, value in arguments.items()
        if name not in (*BANNED, "sequence_bias", "bad_words", "bitmask")
    }
    words = arguments.get("bad_words", {})
    parameters["logit_bias"] = arguments.get("sequence_bias")
    parameters["bad_words_ids"] = [list(ids) for ids in words if len(ids) > 1]
    single = (ids[0] for ids in words if len(ids) == 1)
    banned = [*single, *(token for name in BANNED for token in arguments.get(name, ()))]
    parameters["suppress_tokens"] = list(dict.fromkeys(banned))
    return parameters


class GenerateSampler:
    """Samples the next token of each row by a ``Sampler``.

    It makes a new ``Sampler`` when the arguments change. A row has the noise of
    ``top_k_top_p_sample``, a function of its seed (int or [B]; None: greedy) and of its length
    without padding. The text of a new ``Sampler`` is ``input_ids`` without padding. Tokens that
    only the cache holds are entered as numbers outside the vocabulary.
    """

    def __init__(self, seed: int | torch.Tensor | None, keep_scores: bool) -> None:
        self._seed, self._keep_scores = seed, keep_scores
        self._arguments: dict[str, Any] | None = None
        self._length = -1
        self._sampler: Sampler | None = None
        self._drawn = torch.empty(0, dtype=torch.int64, device="cpu")

    def sample(
        self,
        logits: torch.Tensor,
        input_ids: torch.Tensor,
        arguments: dict[str, Any],
        rows: CallRows,
    ) -> SamplerOutput:
        """Choose a token for each row from logits [B, V] after ``input_ids`` [B, S].

        ``arguments`` are those of this step's ``SamplerFusion``.
        """
        asked = {name: value for name, value in arguments.items() if name != "bitmask"}
        sampler = self._sampler
        if sampler is None or asked != self._arguments or rows.length != self._length:
            sampler = self._sampler = self._begin(input_ids, asked, rows)
            self._arguments = asked
        elif self._keep_scores:
            # A finished row continues with padding, which transformers' scores count as text.
            last = input_ids[:, -1]
            for row in (last != self._drawn).nonzero()[:, 0].tolist():
                sampler.rewind(row, 1)
                sampler.accept(row, last[row : row + 1])
        mask = None
        if "bitmask" in arguments:
            mask = fitting_mask(arguments["bitmask"].bitmask(input_ids), rows.vocab)
        self._length = rows.length + 1
        drawn = sampler.sample(logits, mask)
        self._drawn = drawn.index
        return drawn

    def _begin(self, input_ids: torch.Tensor, asked: dict[str, Any], rows: CallRows) -> Sampler:
        parameters = sampler_parameters(asked)
        seed: Any = self._seed
        if seed is None:
            # Temperature 0 keeps one logit; a seed below 0 takes the same one and keeps all.
            seed = -1
            if not self._keep_scores:
                parameters["temperature"] = 0.0
        batch = input_ids.shape[0]
        sampler = Sampler(
            batch,
            rows.vocab,
            dialect="transformers",
            return_logits=self._keep_scores,
            seed=seed,
            **parameters,
        )
        padding = rows.padding
        if not isinstance(padding, Tensor):
            padding = torch.tensor(padding, device="cpu")
        of_rows = padding.expand(batch).tolist()
        for row, (ids, pads) in enumerate(zip(input_ids, of_rows, strict=True)):
            # All different: they repeat nothing.
            unknown = -1 - torch.arange(max(-pads, 0), device="cpu")
            sampler.insert(row, torch.cat([unknown, ids[max(pads, 0) :]]))
        return sampler
