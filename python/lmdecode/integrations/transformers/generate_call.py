"""Arguments of ``generate()``, and how releases of transformers differ."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from packaging import version
from transformers import LogitsProcessorList
from transformers.generation import utils as generation_utils
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.utils import ModelOutput

from lmdecode._checks import check_int, dtype_name, is_list
from lmdecode.beam.trie import PrefixTokens, Trie
from lmdecode.generation_options import option_names
from lmdecode.sampling.ops import row_tensor

if TYPE_CHECKING:
    from transformers import GenerationConfig
    from transformers._typing import GenerativePreTrainedModel
    from transformers.generation.streamers import BaseStreamer


# Before 5.3 the cache positions in model_kwargs say which inputs are new.
_TAKES_NEXT_SEQUENCE_LENGTH = (
    "next_sequence_length"
    in inspect.signature(generation_utils.GenerationMixin.prepare_inputs_for_generation).parameters
)
#: Name of the cache among a model's arguments and outputs. transformers renamed it in 5.24, and
#: still accepts the former name, with a warning.
CACHE = "cache" if "cache" in generation_utils.ALL_CACHE_NAMES else "past_key_values"
#: Whether beam sampling sorts the drawn candidates, best first; before 5.24 it does not.
SORTS_DRAWN = version.parse(transformers.__version__) >= version.parse("5.24")


def given_cache(arguments: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the cache that arguments of ``generate()`` have, or None, and its name there."""
    for name in (CACHE, "past_key_values"):
        if arguments.get(name) is not None:
            return name, arguments[name]
    return CACHE, None


class CallerArguments(NamedTuple):
    """Arguments that ``generate()`` does not pass to a callable; None where unknown."""

    streamer: BaseStreamer | None = None
    synced_gpus: bool | None = None
    assistant_model: Any = None
    tokenizer: Any = None
    assistant_tokenizer: Any = None


def arguments_of_generate(model: Any, streamer: Any) -> CallerArguments:
    """Return the arguments of ``generate()`` that it does not pass to its callable.

    transformers (5.0 to 5.24) passes a callable only the arguments that it adds to the signature of
    ``_sample``. So a streamer would get the prompt and then nothing, and its reader would wait for
    ever. No hook exposes these arguments. So this function reads them from the frame of
    ``generate()``, which called the loop, and the tokenizers, which ``generate()`` drops, from the
    frame of the decorator. The loop itself must call it.

    If ``streamer`` is None, the streamer of ``generate()`` is returned. The other fields are None
    if the caller is not ``generate()``. Raises ValueError, and ends the streamer so that nobody
    waits for its tokens, if the callable, a function around the loop, did not pass it on.
    """
    code = inspect.unwrap(generation_utils.GenerationMixin.generate).__code__
    caller = sys._getframe(2)
    frame: FrameType | None = caller
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is None or frame.f_locals.get("self") is not model:
        return CallerArguments(streamer)
    if frame is caller:
        given = {name: frame.f_locals.get(name) for name in CallerArguments._fields}
        kwargs = None if frame.f_back is None else frame.f_back.f_locals.get("kwargs")
        if isinstance(kwargs, dict):
            for name in ("tokenizer", "assistant_tokenizer"):
                given[name] = kwargs.get(name)
        found = CallerArguments(**given)
        return found if streamer is None else found._replace(streamer=streamer)
    dropped = frame.f_locals.get("streamer")
    if streamer is None and dropped is not None:
        with ending(dropped):
            raise ValueError(
                "streamer: generate() was given one, which it does not hand to a function around "
                "this loop; bind it to that, as by functools.partial(function, streamer=streamer), "
                "and hand it on"
            )
    return CallerArguments(streamer)


@contextmanager
def ending(streamer: BaseStreamer | None) -> Iterator[None]:
    """End a streamer if the block raises, so that no reader waits for its next token."""
    try:
        yield
    except BaseException:
        if streamer is not None:
            with suppress(Exception):  # the first error matters
                streamer.end()
        raise


def with_stop_strings(
    criteria: StoppingCriteriaList, stop_strings: str | list[str] | None, tokenizer: Any
) -> StoppingCriteriaList:
    """Return the criteria with the one of ``generate(stop_strings=..., tokenizer=...)``.

    ``generate()`` makes it, but with a callable it has dropped the tokenizer by then. Raises
    ValueError without a tokenizer.
    """
    if stop_strings is None:
        return criteria
    if tokenizer is None:
        raise ValueError(
            "tokenizer: expected the model's, which stop_strings are compared with, got None"
        )
    return StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, stop_strings)])


def refuse_other_modes(generation_config: Any) -> None:
    """Raise ValueError for a mode of ``generate()`` other than sampling and greedy search.

    With a callable, ``generate()`` ignores these modes.
    """
    if generation_config.num_beams not in (None, 1):
        raise ValueError(f"num_beams: expected 1 for sampling, got {generation_config.num_beams}")
    penalty_alpha = getattr(generation_config, "penalty_alpha", None)
    if penalty_alpha and not generation_config.do_sample:
        raise ValueError(
            f"penalty_alpha: expected None, this is no contrastive search, got {penalty_alpha}"
        )


def refuse_other_layers(generation_config: Any, reason: str) -> None:
    """Raise ValueError for early exits, contrastive layers and multi-token prediction."""
    _refuse(generation_config, option_names("layers"), reason)


def refuse_assistance(generation_config: Any, assistant_model: Any, reason: str) -> None:
    """Raise ValueError for assisted generation."""
    if assistant_model is not None:
        raise ValueError(f"assistant_model: expected None, {reason}")
    _refuse(generation_config, ("prompt_lookup_num_tokens",), reason)
    refuse_other_layers(generation_config, reason)


def refuse_other_drafts(generation_config: Any, assistant_tokenizer: Any) -> None:
    """Raise ValueError for unsupported options of assisted generation."""
    if assistant_tokenizer is not None:
        raise ValueError("assistant_tokenizer: expected None, a model and its assistant have one")
    _refuse(generation_config, option_names("drafting"), "an assistant_model drafts")


def _refuse(generation_config: Any, refused: Iterable[str], reason: str) -> None:
    for name in refused:
        value = getattr(generation_config, name, None)
        if value is not None and value is not False:
            raise ValueError(f"{name}: expected None, {reason}, got {value!r}")


def needs_synced_gpus(model: Any) -> bool:
    """Tell whether every process has to run the model until the last one is done.

    It has to if the weights are sharded over processes and each forward pass gathers them. This is
    the default of ``generate()``.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return False
    return generation_utils.is_deepspeed_zero3_enabled() or (
        generation_utils.is_fsdp_managed_module(model)
    )


def next_inputs(
    model: GenerativePreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of the next forward pass; input_ids are all tokens, [B, S]."""
    options = {}
    if _TAKES_NEXT_SEQUENCE_LENGTH:
        options["next_sequence_length"] = 1 if model_kwargs["use_cache"] else None
    return model.prepare_inputs_for_generation(input_ids, **options, **model_kwargs)


def check_reads_drafts(name: str) -> None:
    """Raise ValueError if transformers has no way to pass the number of new tokens."""
    if not _TAKES_NEXT_SEQUENCE_LENGTH:
        raise ValueError(f"{name}: expected transformers 5.3 or later, which can read drafts")


def draft_inputs(
    model: GenerativePreTrainedModel,
    input_ids: torch.Tensor,
    drafted: Sequence[int],
    model_kwargs: dict[str, Any],
) -> dict[str, Any]:
    """Return the arguments of a forward pass over the last token of [1, S] and drafted ones."""
    if drafted:
        input_ids = torch.cat([input_ids, input_ids.new_tensor([drafted])], dim=-1)
        model_kwargs = model._update_model_kwargs_for_generation(
            ModelOutput(),
            dict(model_kwargs),
            is_encoder_decoder=model.config.is_encoder_decoder,
            num_new_tokens=len(drafted),
        )
    num_read = 1 + len(drafted)
    inputs = model.prepare_inputs_for_generation(
        input_ids, next_sequence_length=num_read, **model_kwargs
    )
    if "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = num_read
    return inputs


def prefill(
    model: GenerativePreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> Any:
    """Run the model over the prompts, [B, S], and return its outputs."""
    options = {"is_first_iteration": False} if generation_config.is_assistant else {}
    return model._prefill(input_ids, generation_config, model_kwargs, **options)


# Arguments that generate() passes on and that have no effect on a ``Decoding``.
_ALWAYS_IGNORED = (
    "attention_mask",
    "cache_position",
    "next_sequence_length",
    "position_ids",
    "use_cache",
)


def refuse_inner_outputs(config: Any) -> None:
    """Raise ValueError if attributes of the config request outputs of a model's layers."""
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise ValueError(
                f"{name}: expected False, Decoding keeps none of them; model.generate() does"
            )


def refuse_past(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError if arguments of ``generate()`` have keys and values."""
    name, cache = given_cache(arguments)
    if cache is not None:
        raise ValueError(
            f"{name}: expected None, Decoding keeps caches of its own; those of a prompt "
            "are there for a later call with store=, and between steps with Decoding.batch()"
        )


def refuse_handed_on(model_kwargs: dict[str, Any], ignored: Collection[str], what: str) -> None:
    """Raise ValueError for arguments of a forward pass that are not ``ignored``, or always are."""
    for name, value in model_kwargs.items():
        if name not in (*_ALWAYS_IGNORED, *ignored) and value is not None and value is not False:
            raise ValueError(f"{name}: expected None, Decoding hands nothing on to a {what}")


def refuse_seed_of_beams(seed: Any) -> None:
    """Raise ValueError for a seed with beams."""
    if seed is not None:
        raise ValueError(
            f"seed: expected None with beams, got {seed!r}: beam sampling draws from torch's "
            "default generator, for torch.manual_seed"
        )


# --- Seeds ----------------------------------------------------------------------------------------


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


# --- End tokens -----------------------------------------------------------------------------------


def end_tokens(criteria: Iterable[Any]) -> list[int]:
    """Return the tokens of criteria that end a row; other criteria are left out."""
    ends: list[int] = []
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            ends += criterion.eos_token_id.flatten().tolist()
    return ends


def end_tokens_of_criteria(criteria: StoppingCriteriaList, max_length: int) -> list[int] | None:
    """Return the end tokens; None if there are criteria other than these and the length."""
    if type(criteria) is not StoppingCriteriaList:  # its __call__ may do more
        return None
    for criterion in criteria:
        if type(criterion) is not EosTokenCriteria and (
            type(criterion) is not MaxLengthCriteria or criterion.max_length != max_length
        ):
            return None
    return end_tokens(criteria)


# --- Tries, as ``prefix_allowed_tokens_fn`` -------------------------------------------------------


def prefix_tokens_of(processor: object) -> PrefixTokens | None:
    """Return the trie of a processor, and where its sequences begin; None for other processors."""
    if type(processor) is not PrefixConstrainedLogitsProcessor:
        return None
    allowed = processor._prefix_allowed_tokens_fn
    return allowed if isinstance(allowed, PrefixTokens) else None


def behind_prompt(processors: LogitsProcessorList, prompt_length: int) -> LogitsProcessorList:
    """Return the list with each ``Trie`` bound to the end of the prompt."""
    if type(processors) is not LogitsProcessorList:
        return processors
    bound = LogitsProcessorList()
    for processor in processors:
        if type(processor) is PrefixConstrainedLogitsProcessor:
            trie = processor._prefix_allowed_tokens_fn
            if isinstance(trie, Trie):
                processor = PrefixConstrainedLogitsProcessor(
                    PrefixTokens(trie, prompt_length), processor._num_beams
                )
        bound.append(processor)
    return bound


def check_tries(processors: LogitsProcessorList, vocab_size: int) -> None:
    """Raise ValueError for a trie with tokens that a vocabulary does not have."""
    for processor in processors:
        prefix_tokens = prefix_tokens_of(processor)
        if prefix_tokens is not None:
            prefix_tokens.trie.check_vocab("prefix_allowed_tokens_fn", vocab_size)


def has_trie(processors: LogitsProcessorList) -> bool:
    """Tell whether a trie constrains the sequences."""
    return any(prefix_tokens_of(processor) is not None for processor in processors)


def refuse_trie(processors: LogitsProcessorList, name: str, expected: str, given: object) -> None:
    """Raise ValueError for an option that searches with a trie do not support."""
    if has_trie(processors):
        raise ValueError(f"{name}: expected {expected} beside a Trie, got {given}")


# --- Models of CTranslate2 ------------------------------------------------------------------------


def is_of_ctranslate2(model: Any) -> bool:
    """Tell whether a model, not Whisper, came from a folder of CTranslate2."""
    return getattr(getattr(model, "config", None), "ctranslate2", None) is not None
