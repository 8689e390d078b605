"""The sampling and greedy loop, with one fused op a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lmdecode.decoder.stepwise import StepwiseModel
from lmdecode.integrations.transformers._recorder import Recorder
from lmdecode.integrations.transformers._status import raise_for_status
from lmdecode.integrations.transformers.sampling.fusion import (
    BANNED,
    CallRows,
    SamplingFusion,
    fuse_sampling,
)
from lmdecode.integrations.transformers.sampling.logits_process import as_op_logits, fitting_mask
from lmdecode.sampling.ops import top_k_top_p_sample
from lmdecode.sampling.sampler import Sampler
from lmdecode.sampling.types import SamplerOutput

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
    from transformers.generation.streamers import BaseStreamer

__all__ = ["GenerateSampler", "sample_tokens", "sampler_parameters"]


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


# --- The loop -------------------------------------------------------------------------------------


class _ChosenTokens(NamedTuple):
    """The tokens of one step.

    tokens and status are [B] int64 and uint8 (see ``top_k_top_p_sample``). scores (the processed
    logits) and logits (the model's own) are [B, V] float32, or None if not requested.
    """

    tokens: torch.Tensor
    status: torch.Tensor
    scores: torch.Tensor | None
    logits: torch.Tensor | None


def _sample_from(
    logits: torch.Tensor,
    input_ids: torch.Tensor,
    fusion: SamplingFusion,
    seed: int | torch.Tensor | None,
    position: int | torch.Tensor,
    keep_scores: bool,
    keep_logits: bool,
) -> _ChosenTokens:
    """Choose a token for each row of ``logits`` [B, V], a view of the model's, in its dtype."""
    if fusion.processors is not None or keep_logits or (keep_scores and not fusion.stages):
        # Processors expect a float32 copy. Returned logits must not keep the whole prompt's
        # logits alive. In every other case the op reads the model's logits where they are.
        logits = logits.to(torch.float32, copy=True)
    scores = as_op_logits(logits)
    if fusion.processors is not None:
        scores = as_op_logits(fusion.processors(input_ids, logits))  # type: ignore[arg-type]
    if fusion.greedy:
        drawn = top_k_top_p_sample(scores, temperature=0.0, dialect="transformers")
    else:
        drawn = top_k_top_p_sample(
            scores,
            **fusion.stages,
            seed=seed,
            position=position,
            return_logits=keep_scores and bool(fusion.stages),
            dialect="transformers",
        )
    processed = drawn.kept_logits if fusion.stages else scores
    return _ChosenTokens(
        drawn.index,
        drawn.status,
        processed if keep_scores else None,
        logits if keep_logits else None,
    )


def _sample_by_rules(
    logits: torch.Tensor,
    input_ids: torch.Tensor,
    fusion: SamplingFusion,
    sampler: GenerateSampler,
    rows: CallRows,
    keep_scores: bool,
    keep_logits: bool,
) -> _ChosenTokens:
    """Choose a token for each row of ``logits`` [B, V] by ``fusion.sampler``."""
    assert fusion.sampler is not None
    processors = fusion.sampler.processors
    if processors is not None or keep_logits:
        logits = logits.to(torch.float32, copy=True)
    scores = logits
    if processors is not None:
        scores = processors(input_ids, logits)  # type: ignore[arg-type]
    drawn = sampler.sample(as_op_logits(scores), input_ids, fusion.sampler.arguments, rows)
    return _ChosenTokens(
        drawn.index,
        drawn.status,
        drawn.kept_logits if keep_scores else None,
        logits if keep_logits else None,
    )


def _padding(
    input_ids: torch.Tensor, position: int | torch.Tensor, mask: torch.Tensor | None
) -> int | torch.Tensor | None:
    """Return the number of padding tokens before each row, None if unknown.

    A number below 0 counts tokens that only the cache holds. ``position`` is the result of
    ``_first_position``, [B] if it came from the mask.
    """
    length = input_ids.shape[1]
    if not isinstance(position, torch.Tensor):
        return length - position
    assert mask is not None
    ones = mask != 0
    if mask.shape[1] != length or not bool((ones[:, 1:] >= ones[:, :-1]).all()):
        return None
    return length - position


def _first_position(
    input_ids: torch.Tensor, generation_config: GenerationConfig, mask: torch.Tensor | None
) -> int | torch.Tensor:
    """Return the length of the sequences, padding not counted: int or [B] int64.

    It determines the noise, so a row draws the same tokens with any padding.
    """
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        return (mask != 0).sum(dim=-1).to(input_ids.device)
    # generate() drops a mask of ones and notes its length. It differs from the length of
    # input_ids if the prompt came as embeddings or is in the cache already.
    return getattr(generation_config, "_mask_length", input_ids.shape[1])


def sample_tokens(
    model: StepwiseModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    recorder: Recorder,
    *,
    noise: int | torch.Tensor | None,
    mask: torch.Tensor | None,
    streamer: BaseStreamer | None = None,
) -> torch.Tensor:
    """Run the model and choose tokens in turns until all rows have ended: [B, length] int64.

    A trie among the processors is bound to the prompt; ``recorder`` gets the scores and logits of
    each step, ``noise`` is the result of ``noise_of_rows``, and ``mask``, [B, S] or None, has 0 for
    padding. Raises RuntimeError for a row that is not finished and has NaN or nothing above -inf.
    """
    device = input_ids.device
    pad_token = generation_config._pad_token_tensor
    if pad_token is not None:  # a model on several devices may return it on another one
        pad_token = pad_token.to(device)
    has_eos = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    do_sample = bool(generation_config.do_sample)
    position = _first_position(input_ids, generation_config, mask)
    padding = _padding(input_ids, position, mask)
    kept: dict[tuple[str, int], Any] = {}
    unfinished = torch.ones(input_ids.shape[0], dtype=torch.int64, device=device)
    keeps = {
        "keep_scores": recorder.scores is not None,
        "keep_logits": recorder.logits is not None,
    }
    sampler = GenerateSampler(noise, keeps["keep_scores"])

    steps, logits = 0, model.read_prompts(input_ids)
    while True:
        rows = None
        if device.type == "cpu" and padding is not None:
            rows = CallRows(input_ids.shape[1], logits.shape[1], padding, kept)
        fusion = fuse_sampling(logits_processor, do_sample, rows)
        if fusion.sampler is not None and rows is not None:
            step = _sample_by_rules(logits, input_ids, fusion, sampler, rows, **keeps)
        else:
            step = _sample_from(logits, input_ids, fusion, noise, position + steps, **keeps)
        recorder.record(step.scores, step.logits)
        del logits  # frees the logits of a long prompt

        tokens = step.tokens
        if has_eos and pad_token is not None:
            tokens = torch.where(unfinished.bool(), tokens, pad_token)
        input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
        status = step.status * unfinished
        unfinished = unfinished & ~stopping_criteria(input_ids, recorder.scores)
        # The one point of a step at which the host waits for the device.
        failed, any_unfinished = torch.stack((status.max(), unfinished.max())).tolist()
        if failed:
            raise_for_status(status.tolist(), steps)
        if streamer is not None:
            streamer.put(tokens.cpu())
        steps += 1
        if not any_unfinished:
            return input_ids
        logits = model.read(input_ids)
