"""``generate()`` of a decoder-only model with its forward pass in C++."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

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

from lmdecode.beam.engine.request import BeamRequest
from lmdecode.beam.token_rules import TokenRules, one_slot
from lmdecode.decoder.causal_caches import MOST_REQUESTS
from lmdecode.decoder.engine import Engine, Request
from lmdecode.decoder.engine.drafts import Drafting
from lmdecode.decoder.engine.rows import LoopRows
from lmdecode.decoder.engine.steps import causal_rows
from lmdecode.integrations.transformers._recorder import Recorder
from lmdecode.integrations.transformers._status import raise_for_status
from lmdecode.integrations.transformers.beam.fused_processors import (
    looks_back,
    token_rules_of_processors,
    trie_of_processors,
)
from lmdecode.integrations.transformers.beam.generate_beam_search import search_of_call
from lmdecode.integrations.transformers.beam.search import run_search
from lmdecode.integrations.transformers.beam.settings import SearchSettings
from lmdecode.integrations.transformers.generate_call import (
    end_tokens,
    end_tokens_of_criteria,
    ending,
    noise_of_rows,
    seeds_of_rows,
)
from lmdecode.integrations.transformers.sampling.fusion import WARPERS, CallRows, fuse_sampling
from lmdecode.integrations.transformers.sampling.loop import sample_tokens, sampler_parameters
from lmdecode.models.packed_causal import PackedCausalModel
from lmdecode.sampling.sampler_rows import (
    RowRules,
    check_parameters,
    parameters_of_row,
    rules_of_row,
)

if TYPE_CHECKING:
    from transformers import GenerationConfig, StoppingCriteriaList

    from lmdecode.integrations.transformers.decoding.causal_store import StoredCall

__all__ = [
    "CausalCall",
    "EngineCall",
    "decode_causal",
    "engine_call",
    "rules_of_drafts",
    "search_on_engine",
    "write_on_engine",
]


class CausalCall(NamedTuple):
    """Prepared arguments of a ``generate()`` call.

    ``input_ids`` and ``mask`` are [rows, S] int64 on the CPU, and 0 in the mask is padding on the
    left. ``device`` is the device of the caller's tokens and of the result. ``fits_engine`` is
    false if the call uses a feature that engines lack (streamers, constraints).
    """

    model: Any
    input_ids: Tensor
    mask: Tensor | None
    device: torch.device
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    drafting: Drafting | None
    streamer: Any
    seed: Any
    constraints: Any
    force_words_ids: Any
    has_beams: bool
    fits_engine: bool


# --- On an engine ---------------------------------------------------------------------------------


_MAX_STEP_TOKENS = 512
_CAPACITY_STEP = 64  # of engines that are kept
_KEPT_BYTES = 16 << 20
# Their arguments of a Sampler are the same in every step.
_STEADY = {
    NoBadWordsLogitsProcessor, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor, SuppressTokensLogitsProcessor, *WARPERS,
}  # fmt: skip


def _parameters(
    processors: LogitsProcessorList, do_sample: bool, rows: CallRows
) -> dict[str, Any] | None:
    """Return the parameters of an engine's request; None if a processor must be called."""
    if type(processors) is not LogitsProcessorList or any(
        type(processor) not in _STEADY for processor in processors
    ):
        return None
    if not processors:
        return {}
    fusion = fuse_sampling(processors, do_sample, rows)
    if fusion.processors is None and fusion.sampler is None:
        return dict(fusion.stages)
    if fusion.sampler is None or fusion.sampler.processors is not None:
        return None
    return sampler_parameters(fusion.sampler.arguments)


def _end_tokens(stopping_criteria: Any) -> list[int] | None:
    """Return the tokens that end a row; None if another criterion may end it, too."""
    kinds = (EosTokenCriteria, MaxLengthCriteria)
    if any(type(criterion) not in kinds for criterion in stopping_criteria):
        return None
    return end_tokens(stopping_criteria)


def rules_of_drafts(
    packed: PackedCausalModel, call: CausalCall, noise: int | Tensor | None
) -> list[RowRules]:
    """Return the rules that choose each row's drafts; processors beyond such rules are left out."""
    length, vocab = call.input_ids.shape[1], packed.config.vocab_size
    padding: Any = torch.zeros(len(call.input_ids), dtype=torch.int64, device="cpu")
    if call.mask is not None:
        padding = length - (call.mask != 0).sum(-1).to("cpu")
    steady = LogitsProcessorList(p for p in call.processors if type(p) in _STEADY)
    do_sample = bool(call.config.do_sample)
    given = _parameters(steady, do_sample, CallRows(length, vocab, padding, {})) or {}
    if not do_sample:
        given["temperature"] = 0.0
    checked = check_parameters({"temperature": 1.0, **given}, vocab)
    if noise is None:
        seeds: Any = 0
    else:
        seeds = noise.tolist() if isinstance(noise, Tensor) else noise
    return [
        rules_of_row(checked, "transformers", parameters_of_row({"seed": seeds}, row)["seed"])
        for row in range(len(call.input_ids))
    ]


def _raise_for_failed(requests: list[Request]) -> None:
    """Raise for the rows of the first step in which a token could not be chosen."""
    failed = [request for request in requests if request.finish_reason == "error"]
    if not failed:
        return
    if any(not request._state.status for request in failed):
        failed[0].result()  # the error of a step
    first = min(len(request._state.tokens) for request in failed)
    raise_for_status(
        [r._state.status if r in failed and len(r._state.tokens) == first else 0 for r in requests],
        first,
    )


class EngineCall(NamedTuple):
    """Arguments of ``Engine.submit`` that all rows share; ``pad`` pads a row after its end."""

    max_new_tokens: int
    do_sample: bool
    eos_token_id: list[int]
    parameters: dict[str, Any]
    pad: int

    def submit(self, engine: Engine, prompt: Any, seed: int | None) -> Request:
        """Submit a row to an engine; ``seed`` has no effect if nothing is drawn."""
        return engine.submit(
            prompt,
            max_new_tokens=self.max_new_tokens,
            do_sample=self.do_sample,
            seed=seed if self.do_sample else None,
            eos_token_id=self.eos_token_id,
            **self.parameters,
        )


def engine_call(packed: PackedCausalModel, call: CausalCall) -> EngineCall | None:
    """Return the engine call of a ``generate()`` call; None if an engine cannot run it.

    The call must have ``fits_engine`` and no beams.
    """
    config, input_ids = call.config, call.input_ids
    length = input_ids.shape[1]
    ends, pad = _end_tokens(call.criteria), config._pad_token_tensor
    new = config.max_length - length
    if ends is None or new < 1 or config.return_dict_in_generate or (ends and pad is None):
        return None
    vocab = packed.config.vocab_size
    if any(not 0 <= end < vocab for end in ends) or len(input_ids) > MOST_REQUESTS:
        return None
    prompts = _prompts(call)
    if prompts is None:
        return None
    padding: Any = torch.tensor([length - len(prompt) for prompt in prompts], device="cpu")
    do_sample = bool(config.do_sample)
    given = _parameters(call.processors, do_sample, CallRows(length, vocab, padding, {}))
    if given is None:
        return None
    return EngineCall(new, do_sample, ends, given, 0 if pad is None else int(pad))


def _prompts(call: CausalCall) -> list[Tensor] | None:
    """Return the prompts without padding; None if one has padding inside."""
    if call.mask is None:
        return list(call.input_ids)
    seen = call.mask.to(call.input_ids.device) != 0
    if bool((seen[:, 1:] < seen[:, :-1]).any()):
        return None
    return [ids[row] for ids, row in zip(call.input_ids, seen, strict=True)]


@contextmanager
def _engine_of(
    decoding: Any, rows: int, prompts: list[Tensor], new: int, drafting: Drafting | None = None
) -> Iterator[Engine]:
    """Yield an engine for so many rows and new tokens: a small one is kept for the next call.

    It is not kept if the block raises, or has drafts, whose models are the caller's.
    """
    packed, capacity = decoding.decoder, max(1, max(map(len, prompts)) + new - 1)
    capacity = -(-capacity // _CAPACITY_STEP) * _CAPACITY_STEP
    capacity = min(capacity, packed.max_positions or capacity)
    key = (packed, decoding.cache_dtype, rows, capacity)
    engine = decoding.spare_engines.take(key) if drafting is None else None
    if engine is None:
        engine = Engine(
            packed,
            max_requests=rows,
            capacity=capacity,
            max_step_tokens=max(rows, _MAX_STEP_TOKENS),
            cache_dtype=decoding.cache_dtype,
            drafting=drafting,
        )
    yield engine
    if drafting is None and engine.nbytes <= _KEPT_BYTES:
        decoding.spare_engines.give_back(key, engine)


def write_on_engine(decoding: Any, call: CausalCall) -> Tensor | None:
    """Return the result of ``generate()``; None if an engine cannot run the call.

    Raises ValueError or TypeError for an invalid ``seed``, and RuntimeError if a row has no token
    to choose.
    """
    asked, prompts, input_ids = engine_call(decoding.decoder, call), _prompts(call), call.input_ids
    if asked is None or prompts is None:
        return None
    seeds = seeds_of_rows(call.seed, input_ids, call.config)
    if isinstance(seeds, Tensor) and int(seeds.min()) < 0:
        return None
    if seeds is None and asked.do_sample:
        seeds = noise_of_rows(None, input_ids, call.config)
    noise = seeds.tolist() if isinstance(seeds, Tensor) else seeds
    new, drafting = asked.max_new_tokens, call.drafting
    with _engine_of(decoding, len(prompts), prompts, new, drafting) as engine:
        requests = [
            asked.submit(engine, prompt, parameters_of_row({"seed": noise}, row)["seed"])
            for row, prompt in enumerate(prompts)
        ]
        while engine.run_ahead():
            pass
        _raise_for_failed(requests)
    tokens = [request._state.tokens for request in requests]
    longest = max(map(len, tokens))
    texts = [text + [asked.pad] * (longest - len(text)) for text in tokens]
    return torch.cat([input_ids, torch.tensor(texts, dtype=input_ids.dtype, device="cpu")], dim=1)


def _shifted(rules: TokenRules, padding: int) -> TokenRules:
    """Return rules with lengths reduced by ``padding``, for a prompt without it."""
    if not padding:
        return rules
    bans, forced = rules.bans.clone(), rules.forced.clone()
    bans[..., 1:3] -= padding
    forced[..., 0] -= padding
    return rules._replace(bans=bans, forced=forced)


def search_on_engine(decoding: Any, call: CausalCall) -> Tensor | None:
    """Return the result of ``generate()`` with beams; None if an engine cannot run the search.

    The arguments are those of ``write_on_engine``, with ``num_beams`` rows for each prompt.
    """
    config, input_ids, processors = call.config, call.input_ids, call.processors
    if config.do_sample or config.return_dict_in_generate or (config.num_beam_groups or 1) > 1:
        return None
    vocab, num_beams = decoding.decoder.config.vocab_size, config.num_beams
    rows, length = input_ids.shape
    settings = SearchSettings.of(config, input_ids)
    ends = end_tokens_of_criteria(call.criteria, settings.max_length)
    new = settings.max_length - length
    fits = num_beams > 1 and rows % num_beams == 0 and not config.low_memory and new > 0
    fits &= math.isfinite(settings.length_penalty) and rows <= MOST_REQUESTS
    fits &= settings.num_return_sequences <= num_beams and not config.diversity_penalty
    if ends is None or not fits or not 0 <= settings.pad_token < vocab or min(ends, default=0) < 0:
        return None
    prompts = _prompts(call)
    if prompts is None:
        return None
    prompts = prompts[::num_beams]
    rules, trie = one_slot(), None
    if processors or type(processors) is not LogitsProcessorList:
        asked = token_rules_of_processors(processors, vocab, has_timestamps=False)
        if asked is None or bool(asked.diversity_penalty.any()):
            return None
        if looks_back(asked) and any(len(prompt) < length for prompt in prompts):
            return None  # transformers' processors see the padding, too
        rules, trie = asked, trie_of_processors(processors, vocab)
    with _engine_of(decoding, rows, prompts, new) as engine:
        requests = [
            engine.submit_search(
                BeamRequest(
                    prompt,
                    max_new_tokens=new,
                    num_beams=num_beams,
                    num_return_sequences=settings.num_return_sequences,
                    length_penalty=settings.length_penalty,
                    early_stopping=settings.early_stopping,
                    eos_token_id=ends,
                    pad_token_id=settings.pad_token,
                    trie=trie,
                ),
                token_rules=_shifted(rules, length - len(prompt)),
            )
            for prompt in prompts
        ]
        while engine.step():
            pass
    if any(request.finish_reason == "error" for request in requests):
        return None  # the loop in Python names the step in its error
    texts = []
    for request in requests:
        beams = request.result().beams
        assert beams is not None
        texts.append([beams.new_tokens(rank) for rank in range(len(beams.lengths))])
    columns = max((len(tokens) for found in texts for tokens in found), default=0)
    sequences = torch.full(
        (len(prompts), settings.num_return_sequences, length + columns), settings.fill, device="cpu"
    )
    sequences[:, :, :length] = input_ids[::num_beams, None]
    for prompt, found in enumerate(texts):
        for rank, tokens in enumerate(found):
            sequences[prompt, rank, length : length + len(tokens)] = torch.tensor(
                tokens, device="cpu"
            )
    return sequences.flatten(0, 1)


# --- On an engine, or step by step ----------------------------------------------------------------


def decode_causal(decoding: Any, call: CausalCall, stored: StoredCall | None = None) -> Any:
    """Decode by the arguments of ``generate()``: greedily, by sampling, or with any beam search.

    With ``stored`` the prompt is looked up in a store. Returns what ``sample`` and ``beam_search``
    do, without ``past_key_values``, and raises as they do.
    """
    result: Any
    with ending(call.streamer):
        result = None
        if stored is None and call.fits_engine:
            write = search_on_engine if call.has_beams else write_on_engine
            result = write(decoding, call)
        if result is None:
            result = _decode_by_steps(decoding.decoder, decoding.cache_dtype, call, stored)
    if call.streamer is not None:
        call.streamer.end()
    if isinstance(result, Tensor):
        return result.to(call.device)
    return result


def _rows_of_call(
    packed: PackedCausalModel,
    cache_dtype: str,
    call: CausalCall,
    noise: int | Tensor | None,
    stored: StoredCall | None,
) -> LoopRows:
    """Return the rows of a call, whose prompts have no padding."""
    input_ids = call.input_ids
    if call.mask is None:
        prompts = input_ids.tolist()
    else:
        mask = call.mask.to(input_ids.device) != 0
        prompts = [row[seen].tolist() for row, seen in zip(input_ids, mask, strict=True)]
    of_drafts: dict[str, Any] = {}
    if call.drafting is not None:
        of_drafts = {
            "drafting": call.drafting,
            "rules": rules_of_drafts(packed, call, noise),
            "end_tokens": end_tokens(call.criteria),
        }
    return causal_rows(
        packed,
        cache_dtype,
        prompts,
        max(1, call.config.max_length - input_ids.shape[1]),
        **of_drafts,
        stored=None if stored is None else stored.prompts,
        on_read=None if stored is None else stored.saw,
    )


def _decode_by_steps(
    packed: PackedCausalModel, cache_dtype: str, call: CausalCall, stored: StoredCall | None
) -> Any:
    """Return the result of ``generate()``; each step returns to Python."""
    config, input_ids = call.config, call.input_ids
    recorder = Recorder(call.model, config)
    noise = None if call.has_beams else noise_of_rows(call.seed, input_ids, config)
    model = _rows_of_call(packed, cache_dtype, call, noise, stored)
    if call.has_beams:
        search = search_of_call(
            input_ids, call.processors, call.criteria, config, recorder,
            vocab_size=call.model.config.get_text_config(decoder=True).vocab_size,
            constraints=call.constraints,
            force_words_ids=call.force_words_ids,
        )  # fmt: skip
        return recorder.beam_result(search.finish(run_search(model, search, input_ids)))
    sequences = sample_tokens(
        model, input_ids, call.processors, call.criteria, config, recorder,
        noise=noise, mask=call.mask, streamer=call.streamer,
    )  # fmt: skip
    return recorder.result(sequences)
