"""``generate()`` of a decoder-only model with its forward pass in C++."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmdecode._checks import dtype_name
from lmdecode.decoder.causal_caches import CausalCaches
from lmdecode.decoder.causal_weights import PackedCausalModel
from lmdecode.integrations.transformers._prefix_tries import behind_prompt
from lmdecode.integrations.transformers.beam.generation import beam_search
from lmdecode.integrations.transformers.decoding.engine_call import (
    search_on_engine,
    write_on_engine,
)
from lmdecode.integrations.transformers.decoding.lookahead import Lookahead
from lmdecode.integrations.transformers.decoding.refused import (
    refuse_handed_on,
    refuse_inner_outputs,
    refuse_seed_of_beams,
)
from lmdecode.integrations.transformers.decoding.step_model import StepModel, StepOutputs
from lmdecode.integrations.transformers.generate_call import (
    arguments_of_generate,
    ending,
    refuse_assistance,
)
from lmdecode.integrations.transformers.sampling.generation import sample
from lmdecode.integrations.transformers.sampling.read_ahead import Lookup, lookup_of

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

__all__ = ["CausalModel", "decode_causal"]

_OP = "Decoding.generate"
# What generate() hands on and is of no account here.
_IGNORED = frozenset(
    ("attention_mask", "cache_position", "logits_to_keep", "next_sequence_length", "position_ids",
     "use_cache")
)  # fmt: skip


class CausalModel(StepModel):
    """A model to the loops of ``sample`` and ``beam_search``: what they ask of transformers' own.

    Rows whose prompts are the same share them: they are read once.

    Parameters
    ----------
    packed : PackedCausalModel
        Reads tokens.
    model
        The transformers model, for its config.
    input_ids : Tensor
        [rows, S] int64, the prompts, padded on the left.
    attention_mask : Tensor or None
        [rows, S]: 0 is padding.
    max_length : int
        Of a row, padding counted.
    cache_dtype : str
        See ``CausalCaches``.
    lookup : Lookup, optional
        Lets steps read tokens ahead; for loops whose rows stay where they are.
    """

    def __init__(
        self,
        packed: PackedCausalModel,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        max_length: int,
        cache_dtype: str,
        lookup: Lookup | None = None,
    ) -> None:
        self.config = model.config
        rows = input_ids.shape[0]
        if attention_mask is None:
            self._prompts = list(input_ids)
        else:
            mask = attention_mask.to(input_ids.device) != 0
            self._prompts = [row[seen] for row, seen in zip(input_ids, mask, strict=True)]
        longest = max(map(len, self._prompts))
        self.caches = CausalCaches(
            packed,
            rows,
            longest + max(1, max_length - input_ids.shape[1]),
            dtype=cache_dtype,
            rollback=0 if lookup is None else lookup.num_tokens,
        )
        self._entries = torch.tensor([[row, 1, 0, 1] for row in range(rows)])
        self._lookahead: Lookahead | None = None
        if lookup is not None:
            self._lookahead = Lookahead(self.caches, self._prompts, *lookup)

    def _prefill(self, *arguments: Any, **options: Any) -> StepOutputs:
        prompts, leaders, parents = self._prompts, list[int](), list[int]()
        places = dict[tuple[int, ...], int]()  # of each prompt, in leaders
        for row, prompt in enumerate(prompts):
            place = places.setdefault(tuple(prompt.tolist()), len(leaders))
            if place == len(leaders):
                leaders.append(row)
            parents.append(place)
        logits = self._read_prompts(leaders)
        if len(leaders) < len(prompts):
            of_rows = torch.tensor(parents)
            self.caches.reorder(torch.tensor(leaders)[of_rows])
            logits = logits[of_rows]
        return StepOutputs(logits[:, None])

    def _read_prompts(self, leaders: list[int]) -> Tensor:
        """Read the prompts of these rows; returns the logits of their last tokens, [n, V]."""
        entries = torch.tensor([[row, len(self._prompts[row]), 1, 1] for row in leaders])
        tokens = torch.cat([self._prompts[row] for row in leaders])
        return self.caches.forward(tokens, entries, len(leaders))

    def __call__(self, input_ids: Tensor, **options: Any) -> StepOutputs:
        last = input_ids[:, -1].contiguous()
        if self._lookahead is not None:
            logits = self._lookahead.logits(last)
        else:
            logits = self.caches.forward(last, self._entries, len(self._entries))
        return StepOutputs(logits[:, None])

    def _reorder_cache(self, caches: CausalCaches, parents: Tensor) -> CausalCaches:
        caches.reorder(parents)
        return caches


def _first(rows: Tensor) -> int:
    """Return the first row, [rows], of which something is true."""
    return int(rows.int().argmax())


def _some(numbers: Tensor) -> str:
    """Return the first of some numbers, [n]."""
    return f"{numbers[:8].tolist()}{' and more' if len(numbers) > 8 else ''}"


def _refuse(
    config: GenerationConfig,
    model: Any,
    input_ids: Tensor,
    model_kwargs: dict[str, Any],
    has_windows: bool,
) -> None:
    """Raise ValueError for what ``generate()`` was asked for and this does not do."""
    refuse_inner_outputs(config)
    # Outputs of encoders, of which there are none.
    empty = {name for name, value in model_kwargs.items() if isinstance(value, dict) and not value}
    types = model_kwargs.get("token_type_ids")
    # Zeros of Gemma 3's processor say that all is text; other models embed zeros, too.
    if types is not None and model.config.model_type == "gemma3" and not bool(types.any()):
        empty.add("token_type_ids")
    refuse_handed_on(model_kwargs, _IGNORED | empty | {"past_key_values"}, "model")
    if model_kwargs.get("past_key_values") is not None:
        raise ValueError(
            "past_key_values: expected None, Decoding keeps caches of its own; those of a prompt "
            "are there for a later call with store=, and between steps with Decoding.batch()"
        )
    if input_ids.numel() == 0:
        raise ValueError(f"input_ids: expected tokens, got shape {list(input_ids.shape)}")
    if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool:
        raise ValueError(f"input_ids: expected integers, got dtype {dtype_name(input_ids)}")
    mask = model_kwargs.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(input_ids)
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask: expected shape {list(input_ids.shape)}, that of input_ids, got "
            f"{list(mask.shape)}"
        )
    seen = mask != 0
    if not bool(seen.any(dim=-1).all()):
        raise ValueError("attention_mask: expected a token in each row, one is padding alone")
    if not bool(seen[:, -1].all()):
        raise ValueError(
            "attention_mask: expected prompts that are padded on the left, as a tokenizer with "
            f'padding_side="left" does, got 0 for the last token of row {_first(~seen[:, -1])}'
        )
    within = seen[:, :-1] & ~seen[:, 1:]
    if has_windows and bool(within.any()):
        raise ValueError(
            "attention_mask: expected padding on the left alone, got 0 behind 1 in row "
            f"{_first(within.any(-1))}: the windows of transformers' layers count what is masked "
            "within a prompt, those of Decoding do not"
        )
    positions = model_kwargs.get("position_ids")
    if positions is None:
        return
    expected = "position_ids: expected None, or those of prompts that begin at 0"
    if positions.shape[-1] != seen.shape[-1]:
        raise ValueError(f"{expected}, {list(seen.shape)}, got shape {list(positions.shape)}")
    wrong = (positions != seen.cumsum(-1) - 1) & seen
    if bool(wrong.any()):
        row = _first(wrong.any(-1).flatten())
        got = positions.expand(wrong.shape).flatten(0, -2)[row]
        raise ValueError(f"{expected}, got {_some(got)} in row {row}")


def decode_causal(
    new_runner: Callable[..., CausalModel] | None,
    packed: PackedCausalModel,
    cache_dtype: str,
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool | None = None,
    streamer: Any = None,
    *,
    seed: Any = None,
    stop_strings: str | list[str] | None = None,
    tokenizer: Any = None,
    constraints: Any = None,
    force_words_ids: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Decode as ``generate()`` asks for: greedily, sampling, or with beams of any kind.

    Parameters
    ----------
    new_runner
        Makes what stands in for a ``CausalModel``, of the same arguments; None: nothing does.
    packed, cache_dtype
        See ``CausalModel``.
    model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
        As ``generate()`` prepares them.
    synced_gpus
        Of no use here.
    streamer, seed, stop_strings, tokenizer, constraints, force_words_ids
        As ``sample`` and ``beam_search`` take them; ``seed`` with beams is an error.

    Returns
    -------
    Tensor or an output of ``generate()``
        As ``sample`` and ``beam_search`` return it, without ``past_key_values``.

    Raises
    ------
    ValueError
        Names an argument of ``generate()`` that this cannot do.
    RuntimeError
        A row has NaN in its logits, or nothing above -inf.
    """
    config = generation_config
    caller = arguments_of_generate(sys._getframe(1))
    streamer = caller.streamer if streamer is None else streamer
    with ending(streamer):
        config, lookup = lookup_of(config, _OP)
        refuse_assistance(config, caller, "Decoding runs the model itself")
        _refuse(config, model, input_ids, model_kwargs, any(packed.cache_windows))
        has_beams = bool((config.num_beams or 1) > 1 or constraints or force_words_ids)
        if has_beams:
            refuse_seed_of_beams(seed)
        if has_beams and lookup is not None:
            raise ValueError(
                f"prompt_lookup_num_tokens: expected None with beams, got {lookup.num_tokens}"
            )
        device, mask = input_ids.device, model_kwargs.get("attention_mask")
        input_ids = input_ids.to("cpu", torch.int64)
        logits_processor = behind_prompt(logits_processor, input_ids.shape[1])
        most = packed.max_positions
        padding = 0 if mask is None else int((mask == 0).sum(dim=-1).min())
        if most is not None and config.max_length > padding + most + 1:
            raise ValueError(
                f"max_length: expected at most {padding + most + 1}, as the model has {most} "
                f"positions, got {config.max_length}"
            )
        others = (
            new_runner, lookup, streamer, stop_strings, constraints, force_words_ids,
            getattr(config, "constraints", None), getattr(config, "force_words_ids", None),
        )  # fmt: skip
        if all(asked is None for asked in others):
            call: list[Any] = [
                packed, cache_dtype, input_ids, mask, logits_processor, stopping_criteria, config,
            ]  # fmt: skip
            written = search_on_engine(*call) if has_beams else write_on_engine(*call, seed=seed)
            if written is not None:
                return written.to(device)
        new_runner = new_runner or CausalModel
        runner: Any = new_runner(
            packed, model, input_ids, mask, config.max_length, cache_dtype, lookup
        )
        tokenizer = caller.tokenizer if tokenizer is None else tokenizer
        kwargs: dict[str, Any] = {
            "use_cache": True,
            "past_key_values": runner.caches,
            "stop_strings": stop_strings,
            "tokenizer": tokenizer,
        }
        if mask is not None:  # the noise of a row is that of its own positions
            kwargs["attention_mask"] = mask
        common: list[Any] = [
            runner, input_ids, logits_processor, stopping_criteria, config, False, streamer
        ]  # fmt: skip
        result: Any
        if has_beams:
            result = beam_search(
                *common, constraints=constraints, force_words_ids=force_words_ids, **kwargs
            )
        else:
            result = sample(*common, seed=seed, **kwargs)
    if isinstance(result, Tensor):
        return result.to(device)
    result["past_key_values"] = None
    return result
