"""CTranslate2's rules of searches, for models from its folders (``formats.ctranslate2``)."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    LogitNormalization,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from lmdecode.beam.token_rules import TokenRules
from lmdecode.generation_options import option_names
from lmdecode.integrations.transformers.beam.candidates import accumulate
from lmdecode.integrations.transformers.beam.fused_processors import (
    looks_back,
    token_rules_of_processors,
)
from lmdecode.integrations.transformers.beam.search import PlainSearch
from lmdecode.integrations.transformers.generate_call import is_of_ctranslate2

__all__ = ["FolderProcessors", "acts_first_alone", "with_defaults", "with_rules"]

_UNUSED_SCORE = -1e10  # CTranslate2's own
_LOOKING_BACK = (NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor)
_LACKING = (*option_names("constraints"), "diversity_penalty")  # unknown to CTranslate2


def with_defaults(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of ``generate()`` with the defaults of a model ``is_of_ctranslate2``.

    In a generation config transformers would warn about defaults that others make useless.
    """
    given = copy.deepcopy(arguments.get("generation_config"))
    filled: dict[str, Any] = {}

    def value(name: str) -> Any:
        configs = (given, getattr(model, "generation_config", None))
        found = [filled.get(name), arguments.get(name), *(getattr(c, name, None) for c in configs)]
        return next((each for each in found if each is not None), None)

    for name, default in model.config.ctranslate2["defaults"].items():
        if value(name) is None and value(name.replace("_length", "_new_tokens")) is None:
            filled[name] = default
    if value("max_new_tokens") is None and value("max_length") is not None:
        # transformers before 5.3 adds the prompt's length to one of the model's generation config.
        filled["max_length"] = value("max_length")
    if (value("num_beams") or 1) > 1 and value("early_stopping") is None:
        # Without a penalty it goes on until its best beam has ended.
        filled["early_stopping"] = value("length_penalty") != 0
    if given is None:
        return {**arguments, **filled}
    given.update(**filled)
    return {**arguments, "generation_config": given}


def with_rules(
    model: Any, config: Any, processors: LogitsProcessorList, rows: Tensor, mask: Any = None
) -> LogitsProcessorList:
    """Return the processors of a call with CTranslate2's rules, if ``renormalize_logits`` is on.

    rows, mask: the prompts, [rows, S], and 0 for padding on the left, if there is any.
    """
    others = any(getattr(config, name, None) for name in _LACKING)
    if others or not is_of_ctranslate2(model) or not config.renormalize_logits:
        return processors
    unseen = torch.ones(len(rows), dtype=torch.int64, device="cpu")
    if mask is not None:
        unseen += (mask == 0).sum(dim=1).cpu()
    keeps_norm = (config.num_beams or 1) > 1 or config.output_scores
    if keeps_norm or any(type(processor) in _LOOKING_BACK for processor in processors):
        return FolderProcessors(processors, unseen)
    # The most probable token is the same.
    return LogitsProcessorList(p for p in processors if type(p) is not LogitNormalization)


def acts_first_alone(rules: TokenRules, length: int) -> bool:
    """Tell whether rules change only the first token after ``length`` tokens."""
    changes = looks_back(rules) or bool(rules.diversity_penalty.any()) or rules.bias.numel()
    bans = rules.bans[rules.bans[..., 0] >= 0]
    return not changes and bool((bans[:, 2] <= length).all())


class FolderSearch(PlainSearch):
    """Beam search with ``FolderProcessors``, which change logits.

    The length counts the prompt without its first token. After a prompt of several tokens, only
    the best beam may end in the first step; an end token of another one leaves its beam unused.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        processors = cast("FolderProcessors", self.processors)
        unseen = processors.unseen[:: self.settings.num_beams]
        self.parameters.prompt_lengths.copy_(unseen)
        self._has_prefix = (unseen < self.settings.prompt_length)[:, None]

    def accumulated_scores(self, logits: Tensor, input_ids: Tensor, beam_scores: Tensor) -> Tensor:
        raw, width = self.recorder.copy_of(logits), self.settings.num_beams
        # The last one is the log-softmax.
        log_probs = self.processors(input_ids, logits.to(torch.float32))  # type: ignore[arg-type]
        self.recorder.record(log_probs, raw)
        found = accumulate(log_probs, beam_scores)
        if input_ids.shape[1] > self.settings.prompt_length:
            return found
        scores, places = found.topk(min(width + len(self.end_tokens), found.shape[1]))
        ends = torch.isin(places % logits.shape[1], self.end_tokens)
        late = ends & (torch.arange(ends.shape[1], device=ends.device) > 0)
        lost = late[:, :width].sum(dim=1, keepdim=True)
        is_left = (~ends).cumsum(dim=1) <= width - lost
        scores = scores.masked_fill(~is_left, _UNUSED_SCORE).masked_fill(late, -torch.inf)
        rest = torch.full_like(found, _UNUSED_SCORE).scatter(1, places, scores)
        return torch.where(self._has_prefix & (lost > 0), rest, found)


class FolderProcessors(LogitsProcessorList):
    """Processors of logits; the ops have only processors of log-probabilities.

    unseen: tokens of each row before those that penalties and n-grams see, [rows] int64.
    """

    search = FolderSearch

    def __init__(self, processors: LogitsProcessorList, unseen: Tensor) -> None:
        # transformers has passed the padding to penalties; rows here have no padding.
        kind = RepetitionPenaltyLogitsProcessor
        super().__init__(kind(float(p.penalty)) if type(p) is kind else p for p in processors)
        self.unseen, self._counts = unseen, unseen.tolist()

    def __call__(self, input_ids: Tensor, scores: Tensor, **more: Any) -> Tensor:
        for processor in self:
            if type(processor) in _LOOKING_BACK:
                rows = zip(input_ids[:, None], scores[:, None], self._counts, strict=True)
                scores = torch.cat([processor(ids[:, n:], row) for ids, row, n in rows])
            else:
                scores = processor(input_ids, scores)
        return scores

    def rules_of_first_step(self, vocab_size: int, length: int) -> TokenRules | None:
        """Return the rules if ``DecodingSearches.choose_first`` is all they need."""
        plain = LogitsProcessorList(p for p in self if type(p) is not LogitNormalization)
        rules = token_rules_of_processors(plain, vocab_size, has_timestamps=False)
        fits = rules is not None and length == 1 and acts_first_alone(rules, length)
        return rules if fits else None
