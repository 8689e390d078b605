"""``generate()`` without beams on an ``Engine``, where nothing of Python's stands between steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from lmdecode.decoder.causal_weights import PackedCausalModel
from lmdecode.decoder.engine import Engine, Request
from lmdecode.integrations.transformers._status import raise_for_status
from lmdecode.integrations.transformers.generate_call import (
    refuse_other_layers,
    refuse_other_modes,
)
from lmdecode.integrations.transformers.sampling.edits import Rows
from lmdecode.integrations.transformers.sampling.generation import seeds_of_rows
from lmdecode.integrations.transformers.sampling.plan import WARPERS, plan_sampling
from lmdecode.integrations.transformers.sampling.row_sampler import sampler_parameters
from lmdecode.sampling.sampler_rows import parameters_of_row

__all__ = ["write_on_engine"]

_MAX_STEP_TOKENS = 512
# What these ask of a Sampler is the same in every step.
_STEADY = {
    NoBadWordsLogitsProcessor, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor, SuppressTokensLogitsProcessor, *WARPERS,
}  # fmt: skip


def _parameters(
    processors: LogitsProcessorList, do_sample: bool, rows: Rows
) -> dict[str, Any] | None:
    """Return what an engine's request asks for; None: a processor has to be called."""
    if type(processors) is not LogitsProcessorList or any(
        type(processor) not in _STEADY for processor in processors
    ):
        return None
    plan = plan_sampling(processors, do_sample, rows)
    if plan.processors is None and plan.sampler is None:
        return dict(plan.stages)
    if plan.sampler is None or plan.sampler.processors is not None:
        return None
    return sampler_parameters(plan.sampler.arguments)


def _end_tokens(stopping_criteria: Any) -> list[int] | None:
    """Return the tokens that end a row; None: something else ends one, too."""
    ends: list[int] = []
    for criterion in stopping_criteria:
        if type(criterion) is EosTokenCriteria:
            ends += criterion.eos_token_id.flatten().tolist()
        elif type(criterion) is not MaxLengthCriteria:
            return None
    return ends


def _raise_for_failed(requests: list[Request]) -> None:
    """Raise for the rows of the first step in which a token could not be chosen."""
    failed = [request for request in requests if request.finish_reason == "error"]
    if not failed:
        return
    if any(not request._status for request in failed):
        failed[0].result()  # the error of a step
    first = min(len(request._tokens) for request in failed)
    raise_for_status(
        [r._status if r in failed and len(r._tokens) == first else 0 for r in requests], first
    )


def write_on_engine(
    packed: PackedCausalModel,
    cache_dtype: str,
    input_ids: Tensor,
    mask: Tensor | None,
    logits_processor: Any,
    stopping_criteria: Any,
    config: Any,
    seed: Any,
) -> Tensor | None:
    """Return what ``generate()`` returns; None where an engine cannot write it.

    Parameters
    ----------
    packed, cache_dtype
        See ``Engine``.
    input_ids, mask
        [rows, S], as ``generate()`` has them, and of padding on the left or None.
    logits_processor, stopping_criteria, config, seed
        As ``sample`` takes them.

    Raises
    ------
    ValueError, TypeError
        For a ``seed`` that is none.
    RuntimeError
        No token can be chosen in a row.
    """
    refuse_other_modes(config)
    refuse_other_layers(config, "this loop runs all layers of a model")
    rows, length = input_ids.shape
    ends, pad = _end_tokens(stopping_criteria), config._pad_token_tensor
    new = config.max_length - length
    if ends is None or new < 1 or config.return_dict_in_generate or (ends and pad is None):
        return None
    vocab = packed.config.vocab_size
    if any(not 0 <= end < vocab for end in ends):
        return None
    seen = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device) != 0
    if bool((seen[:, 1:] < seen[:, :-1]).any()):  # padding within a prompt
        return None
    padding: Any = length - seen.sum(-1)
    do_sample = bool(config.do_sample)
    given = _parameters(logits_processor, do_sample, Rows(length, vocab, padding, {}))
    if given is None:
        return None
    seeds = seeds_of_rows(seed, input_ids, config)
    if seeds is None and do_sample:
        seeds = torch.randint(0, 2**63 - 1, (rows,))
    if isinstance(seeds, Tensor) and int(seeds.min()) < 0:
        return None
    noise = seeds.tolist() if isinstance(seeds, Tensor) else seeds
    prompts = [ids[row] for ids, row in zip(input_ids, seen.bool(), strict=True)]
    engine = Engine(
        packed,
        max_requests=rows,
        capacity=max(1, max(map(len, prompts)) + new - 1),
        max_step_tokens=max(rows, _MAX_STEP_TOKENS),
        cache_dtype=cache_dtype,
    )
    requests = [
        engine.submit(
            prompt,
            max_new_tokens=new,
            do_sample=do_sample,
            seed=parameters_of_row({"seed": noise}, row)["seed"] if do_sample else None,
            eos_token_id=ends,
            **given,
        )
        for row, prompt in enumerate(prompts)
    ]
    while engine.step():
        pass
    _raise_for_failed(requests)
    longest = max(len(request._tokens) for request in requests)
    fill = 0 if pad is None else int(pad)
    texts = [r._tokens + [fill] * (longest - len(r._tokens)) for r in requests]
    return torch.cat([input_ids, torch.tensor(texts, dtype=input_ids.dtype)], dim=1)
