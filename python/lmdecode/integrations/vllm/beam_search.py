"""Beam search by the rules of transformers, over the log-probabilities that vLLM returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lmdecode._checks import type_error
from lmdecode.beam import BeamRequest, BeamResult, BeamSearch

_OP = "beam_search"
# What looks at tokens that are not among the best ones, or at what vLLM does not return.
_REFUSED = ("logit_bias", "coverage_penalty", "trie", "request_id")


def beam_search(llm: Any, prompts: Sequence[Any], **arguments: Any) -> list[BeamResult]:
    """Search with beams in an engine of vLLM.

    A step is one call of ``llm.generate`` with every beam of every prompt, which computes one token
    of each: vLLM's prefix cache has the whole blocks of the rest. Candidates come from the best
    log-probabilities of each beam, as many as the search can need, so the result is that of a
    search over all of them: of transformers' ``generate(num_beams=...)``, scores to 1e-5, as far as
    the models' logits agree.

    Parameters
    ----------
    llm : vllm.LLM
        Its ``logprobs_mode`` is "raw_logprobs", vLLM's default. Its ``max_logprobs`` (20) is at
        least ``2 * num_beams + 1``. Groups take ``num_beams`` more, each end token but the first as
        many, ``suppress_tokens`` and ``min_new_tokens`` one for each token that they ban, and
        ``repetition_penalty`` and ``no_repeat_ngram_size`` one for each token of the text. -1 is
        all.
    prompts : sequence
        Each a str, or a sequence of tokens.
    **arguments
        Of ``lmdecode.BeamRequest``, the same for all prompts: ``max_new_tokens``, which is needed,
        ``num_beams``, ``length_penalty``, ``early_stopping``, ``num_return_sequences``, groups and
        processors; and ``eos_token_id``, by default the tokenizer's, as in vLLM: None is no end.

    Returns
    -------
    list of BeamResult
        One a prompt: sequences, best first, and their scores.

    Raises
    ------
    ValueError
        Names the argument that the log-probabilities do not suffice for, or the limit of the engine
        that is too small; nothing has been computed.
    TypeError
        ``prompts`` is a str, or a prompt is neither a str nor tokens.
    """
    for name in _REFUSED:
        if name in arguments:
            raise ValueError(
                f"{_OP}: {name} was given; expected what the best log-probabilities suffice for"
            )
    for name, least in (("repetition_penalty", 1.0), ("diversity_penalty", 0.0)):
        if arguments.get(name, least) < least:
            raise ValueError(f"{_OP}: {name} is {arguments[name]}; expected at least {least}")
    config = llm.llm_engine.vllm_config.model_config
    if config.logprobs_mode != "raw_logprobs":
        raise ValueError(
            f"{_OP}: logprobs_mode of the engine is {config.logprobs_mode!r}; expected "
            f"'raw_logprobs'"
        )
    if isinstance(prompts, str):
        raise type_error(_OP, "prompts", prompts, "a sequence of prompts")
    if "eos_token_id" not in arguments:
        arguments["eos_token_id"] = getattr(llm.get_tokenizer(), "eos_token_id", None)
    vocab = config.get_vocab_size()
    # The last column has the mass of all tokens that are not returned, and is never chosen.
    banned = [*arguments.pop("suppress_tokens", ()), vocab]
    requests = [
        BeamRequest(_tokens_of(llm, prompt), suppress_tokens=banned, request_id=place, **arguments)
        for place, prompt in enumerate(prompts)
    ]
    for request in requests:
        length = request.max_length
        if length > config.max_model_len:
            raise ValueError(
                f"{_OP}: prompts[{request.request_id}] and max_new_tokens have {length} tokens; "
                f"expected at most {config.max_model_len}, max_model_len of the engine"
            )
        most = _candidates(request, length, vocab)
        if most > config.max_logprobs >= 0:
            raise ValueError(
                f"{_OP}: {most} log-probabilities a beam are needed; max_logprobs of the engine is "
                f"{config.max_logprobs}"
            )
    return _search(llm, requests, vocab)


def _tokens_of(llm: Any, prompt: Any) -> Any:
    if isinstance(prompt, str):
        return llm.get_tokenizer()(prompt).input_ids
    return prompt


def _candidates(request: BeamRequest, length: int, vocab: int) -> int:
    """Of so many best tokens of a beam some may be banned or lowered, and enough are left."""
    count = request.num_candidates * request.num_beam_groups + len(request.suppress_tokens)
    if request.num_beam_groups > 1:
        count += request.num_beams
    if request.min_new_tokens > 0:
        count += len(request.eos_token_id)
    if request.repetition_penalty != 1.0 or request.no_repeat_ngram_size > 0:
        count += length
    return min(count, vocab)


def _search(llm: Any, requests: Sequence[BeamRequest], vocab: int) -> list[BeamResult]:
    from vllm import SamplingParams

    engine, results = BeamSearch(), {}
    for request in requests:
        engine.insert(request)
    while engine.num_rows:
        rows = engine.input_ids()
        lengths = rows.lengths.tolist()
        texts = [ids[:length] for ids, length in zip(rows.input_ids.tolist(), lengths, strict=True)]
        count = max(_candidates(request, max(lengths), vocab) for request in requests)
        params = SamplingParams(
            max_tokens=1, temperature=0.0, logprobs=count, detokenize=False, ignore_eos=True
        )
        outputs = llm.generate(
            [{"prompt_token_ids": text} for text in texts], params, use_tqdm=False
        )
        engine.step(_logits([output.outputs[0].logprobs[0] for output in outputs], vocab))
        results.update({result.request_id: result for result in engine.pop_finished()})
    return [results[request.request_id] for request in requests]


def _logits(rows: list[dict[int, Any]], vocab: int) -> Tensor:
    """[rows, vocab + 1], whose softmax is that of all tokens."""
    logits = torch.full((len(rows), vocab + 1), -math.inf, dtype=torch.float32, device="cpu")
    for row, best in enumerate(rows):
        values = torch.tensor(
            [one.logprob for one in best.values()], dtype=torch.float64, device="cpu"
        )
        logits[row, torch.tensor(list(best), device="cpu")] = values.float()
        rest = 1.0 - values.exp().sum().item()
        if rest > 0.0:
            logits[row, vocab] = math.log(rest)
    return logits
