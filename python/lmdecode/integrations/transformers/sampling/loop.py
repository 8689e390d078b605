"""The sampling and greedy loop, with one fused op a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lmdecode._checks import check_int, dtype_name, is_list
from lmdecode.decoder.stepwise import StepwiseModel
from lmdecode.integrations.transformers._recorder import Recorder
from lmdecode.integrations.transformers._status import raise_for_status
from lmdecode.integrations.transformers.sampling.fusion import SamplingFusion, fuse_sampling
from lmdecode.integrations.transformers.sampling.generate_sampler import GenerateSampler
from lmdecode.integrations.transformers.sampling.logits_process import as_op_logits
from lmdecode.integrations.transformers.sampling.sampler_arguments import CallRows
from lmdecode.sampling.ops import row_tensor, top_k_top_p_sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
    from transformers.generation.streamers import BaseStreamer

__all__ = ["noise_of_rows", "sample_tokens", "seeds_of_rows"]


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


def seeds_of_rows(
    seed: int | Sequence[int] | torch.Tensor | None,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
) -> int | torch.Tensor | None:
    """Return the seeds as the op takes them; raise if they are invalid or do not fit the rows.

    Greedy search uses no noise, but its seeds are checked here too.
    """
    if seed is None:
        return None
    if is_list(seed):
        seed = row_tensor("seed", seed, torch.int64, input_ids.device)
    elif not isinstance(seed, torch.Tensor) or not seed.dim():
        number = check_int("sample", "seed", seed, kind="an int, a list or a tensor of them")
        if number < 0:
            raise ValueError(f"seed: expected an int >= 0, got {number}")
        return number
    if seed.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"seed: expected a tensor of int64 or int32, got {dtype_name(seed)}")
    rows, results = input_ids.shape[0], generation_config.num_return_sequences or 1
    if seed.shape != (rows,):
        reason = ""
        if results > 1:
            reason = f", as num_return_sequences = {results} makes {results} rows of each prompt"
        raise ValueError(
            f"seed: expected one number, or one for each of {rows} rows{reason}; "
            f"got {list(seed.shape)}"
        )
    return seed


def noise_of_rows(
    seed: int | Sequence[int] | torch.Tensor | None,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
) -> int | torch.Tensor | None:
    """Return ``seeds_of_rows``, drawn if sampling has no seed; None for greedy search."""
    seeds = seeds_of_rows(seed, input_ids, generation_config)
    if not generation_config.do_sample:
        return None
    if seeds is None:
        return torch.randint(0, 2**63 - 1, (input_ids.shape[0],), device=input_ids.device)
    return seeds


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
