"""``generate_batch``: transformers' continuous batching on lmdecode's attention and sampler."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from lmdecode._checks import MAX_INT, check_int, is_list
from lmdecode.generation_options import NEUTRAL, OPTIONS, option_names
from lmdecode.integrations.transformers.continuous_batching.attention import NAME, register_flash
from lmdecode.integrations.transformers.continuous_batching.sampling import (
    BatchProcessors,
    use_fused_sampling,
)
from lmdecode.integrations.transformers.continuous_batching.stored_prefixes import (
    StoredPrefixes,
    check_prefix_store,
)
from lmdecode.sampling.ops import row_seed

if TYPE_CHECKING:
    from lmdecode.store import KVStore


_CALL = "generate_batch"


class BatchingManager(ContinuousBatchingManager):
    """A ``ContinuousBatchingManager`` whose attention and sampling are lmdecode's.

    While it runs, the model has ``attn_implementation="lmdecode_flash"``. ``add_request`` takes
    ``seed``, ``temperature``, ``top_k``, ``top_p`` and ``min_p`` of its own where the generation
    config samples. A request with a seed has the same text alone and in any batch, that of
    ``generate(custom_generate=sample)`` with this seed. Without one, a request takes its own from
    ``seed``, or from torch's default generator.

    Parameters
    ----------
    model
        One whose attention ``transformers`` can batch continuously.
    generation_config, continuous_batching_config
        As of ``model.init_continuous_batching``; None: the model's, and the defaults.
    seed
        int >= 0, which gives the i-th request the seed that ``top_k_top_p_sample`` gives the i-th
        row; or a sequence of them, one for each request in the order of their arrival.
    store
        A ``KVStore`` of ``Fingerprint.from_model(model)``: what it has of a prompt is loaded, and
        texts are stored when their prompt has been computed and when they end. Models with sliding
        windows cannot have one.

    Raises
    ------
    ValueError, TypeError
        For a seed that is none, for an option that continuous batching or a request cannot have,
        and for a store of another model.
    """

    def __init__(
        self,
        model: Any,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        store: KVStore | None = None,
    ) -> None:
        self._seed = _checked_seed(seed)
        register_flash()
        config = checked_config(_CALL, generation_config or model.generation_config)
        batching = continuous_batching_config or ContinuousBatchingConfig()
        if store is not None:
            check_prefix_store(_CALL, model, batching, store)
        self._store = store
        # What transformers itself reads; of the rest it would make processors without a prompt.
        plain = GenerationConfig(**{name: getattr(config, name) for name in OF_REQUESTS})
        plain.eos_token_id = -1 if config.eos_token_id is None else config.eos_token_id
        self._config, self._model = config, model
        processors = BatchProcessors(self._processors_of, bool(config.do_sample))
        if processors.calls_any and model.device.type != "cpu":  # where the last token may be late
            raise ValueError(
                f"{_CALL}: the model is on {model.device}; expected the CPU with processors that "
                "are called with the text so far, such as repetition_penalty"
            )
        super().__init__(model, plain, batching)
        self._processors = processors if config.do_sample else None
        if processors.do_processing:
            self.logit_processor = processors

    def _processors_of(
        self, prompt: list[int], max_length: int | None, ends: Collection[int]
    ) -> LogitsProcessorList:
        """Return the processors of ``generate()`` for a prompt."""
        config = copy.copy(self._config)
        device = self._model.device
        config._eos_token_tensor = torch.tensor(sorted(ends), device=device) if ends else None
        config.max_length = max_length
        processors: LogitsProcessorList = self._model._get_logits_processor(
            config, len(prompt), torch.tensor([prompt], device=device), device=device
        )
        return processors

    def _new_tokens(self, prompt: Sequence[int], max_new_tokens: int | None = None) -> int | None:
        """Return the maximum number of new tokens; raise for a prompt without room for one."""
        if len(prompt) == 0:
            raise ValueError(f"{_CALL}: a prompt is empty; expected at least one token")
        new = self._config.max_new_tokens if max_new_tokens is None else max_new_tokens
        name, longest = "max_new_tokens", self._config.max_length
        if new is None and longest is not None:
            name, new = f"max_length less {len(prompt)} tokens of a prompt", longest - len(prompt)
        return new if new is None else check_int(_CALL, name, new, 1)

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Set the attention of lmdecode; ``stop`` sets the model's own again."""
        configs = {id(config): config for config in (model.config, model.config.get_text_config())}
        if model.config._attn_implementation != NAME:
            self._original_attn_impl = model.config._attn_implementation
        for config in configs.values():
            # set_attn_implementation would look for a package of this name.
            config._attn_implementation = NAME

    def add_request(
        self, input_ids: list[int], request_id: str | None = None, *args: Any, **arguments: Any
    ) -> str | None:
        """Add a request, as ``ContinuousBatchingManager.add_request`` does.

        Raises
        ------
        ValueError, TypeError
            For an argument that is none of a request's, before it is queued.
        """
        own = ("max_new_tokens", "streaming", "record_timestamps", "eos_token_id")
        arguments |= dict(zip(own, args, strict=False))
        new = self._new_tokens(input_ids, arguments.get("max_new_tokens"))
        arguments["max_new_tokens"] = new
        asked = {name: value for name, value in arguments.items() if name not in own}
        if self._processors is None:
            if asked:
                raise ValueError(
                    f"{_CALL}: a request has {', '.join(map(repr, asked))}, and the generation "
                    "config has do_sample=False; expected no argument of sampling"
                )
            return super().add_request(input_ids, request_id, **arguments)
        self._processors.check_request(asked)
        number = None
        if request_id is None:
            with self._request_lock:
                number = self._request_counter
                self._request_counter += 1
            request_id = f"req_{number}"
        elif request_id.startswith("req_") and request_id[4:].isdecimal():
            number = int(request_id[4:])
        if arguments.get("seed") is None:
            arguments["seed"] = self._seed_of(number)
        return super().add_request(input_ids, request_id, **arguments)

    def _seed_of(self, number: int | None) -> int:
        if self._seed is not None and number is not None:
            if isinstance(self._seed, int):
                return row_seed(self._seed, number)
            if number < len(self._seed):
                return self._seed[number]
        return int(torch.randint(0, MAX_INT, (), device="cpu"))

    def _create_batch_processor(self) -> Any:
        processor = super()._create_batch_processor()
        if self._processors is not None:
            use_fused_sampling(processor.model_runner, self._processors)
        if self._store is not None:
            StoredPrefixes(_CALL, processor.cache, self._store)
        return processor


def _checked_seed(seed: int | Sequence[int] | None) -> int | list[int] | None:
    if seed is None:
        return None
    if isinstance(seed, torch.Tensor):
        seed = seed.tolist()
    if is_list(seed):
        return [check_int(_CALL, f"seed[{i}]", number, 0) for i, number in enumerate(seed)]
    return check_int(_CALL, "seed", seed, 0, kind="an int or a list of them")


def generate_batch(
    model: Any,
    inputs: list[list[int]],
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    *,
    seed: int | Sequence[int] | None = None,
    store: KVStore | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Generate texts of many prompts by ``model.generate_batch``, with lmdecode's ops.

    Attention reads the paged cache as a ragged batch, without masks; one fused call draws the
    tokens of all requests.

    Parameters
    ----------
    model
        A causal model of transformers.
    inputs
        The tokens of each prompt.
    generation_config, continuous_batching_config
        As of ``model.generate_batch``.
    seed
        int >= 0, or one for each prompt: the noise of a text is a function of its seed and of the
        token's place alone, so that it is the same alone and in any batch. None: from torch's
        default generator. Without effect in greedy search.
    store
        As of ``BatchingManager``.
    arguments
        Further ones of ``model.generate_batch``: ``progress_bar``, ...; and options of a
        generation config, such as ``max_new_tokens``.

    Returns
    -------
    dict
        ``GenerationOutput`` of each request by its name, in the order of ``inputs``.

    Raises
    ------
    ValueError, TypeError
        For a seed that is none, one that does not fit the prompts, a store of another model,
        ``persistent_manager``, an empty prompt, and an argument or an option that it cannot have.
    RuntimeError
        Where the model keeps a manager of continuous batching already, and where a request fails.
    """
    if arguments.pop("persistent_manager", False):
        raise ValueError(
            f"{_CALL}: persistent_manager is True; expected False: keep a BatchingManager instead"
        )
    seeds = _checked_seed(seed)
    if isinstance(seeds, list) and len(seeds) != len(inputs):
        raise ValueError(
            f"{_CALL}: seed has {len(seeds)} numbers; expected one for each of "
            f"{len(inputs)} prompts"
        )
    if getattr(model, "_cached_continuous_batching_manager", None) is not None:
        raise RuntimeError(
            f"{_CALL}: the model keeps a manager of continuous batching; call "
            "model.destroy_cached_continuous_batching_manager() before"
        )
    config = generation_config or model.generation_config
    own = inspect.signature(model.generate_batch).parameters
    if asked := {name: arguments.pop(name) for name in arguments.keys() - own.keys()}:
        config = copy.deepcopy(config)
        asked = config.update(**asked)  # what is no option
    for name in asked:
        raise TypeError(f"{_CALL}: {name} is given, which is no argument or option of this call")
    original = model.config._attn_implementation
    try:
        manager = BatchingManager(
            model, config, continuous_batching_config, seed=seeds, store=store
        )
        for prompt in inputs:
            manager._new_tokens(prompt)
        # transformers takes the manager that it finds here, and none of another class otherwise.
        model._cached_continuous_batching_manager = manager
        results = model.generate_batch(inputs, manager.generation_config, **arguments)
    finally:
        vars(model).pop("_cached_continuous_batching_manager", None)
        if NAME == model.config._attn_implementation != original:  # the manager has not started
            model.set_attn_implementation(original)
    # transformers logs an error, and returns what there is.
    failed = [f"{name}: {found.error}" for name, found in results.items() if found.error]
    expected = len(inputs) * (config.num_return_sequences or 1)
    if failed or len(results) != expected:
        cause = manager.background_thread_status.fatal_error
        what = failed[0] if failed else "transformers returned no result; its log has the reason"
        lost = max(len(failed), expected - len(results))
        raise RuntimeError(
            f"{_CALL}: {lost} of {expected} requests failed, the first with {what}"
        ) from cause
    return results


OF_REQUESTS = option_names(continuous="request")
# Processors of ``generate()``, which are called or fused.
OF_PROCESSORS = option_names(continuous="processor")
# Of padding, other caches, searches and drafts that others ask for, and the form of a result.
WITHOUT_EFFECT = option_names(continuous="ignored")
REFUSED = {
    option.name: option.continuous
    for option in OPTIONS
    if option.continuous not in (None, "request", "processor", "ignored")
}


def checked_config(call: str, config: Any) -> Any:
    """Return a copy of a config, without options that continuous batching cannot have.

    Attributes that are none of transformers' own are left aside, as by ``generate()``. An option
    that is set and cannot be had, or is not in the lists above, is a ValueError.
    """
    names = vars(type(config)()).keys() - {*OF_REQUESTS, *OF_PROCESSORS, *WITHOUT_EFFECT}
    for name in sorted(names):
        value = getattr(config, name, None)
        if value is not None and value is not False and value != NEUTRAL.get(name):
            reason = REFUSED.get(name, "continuous batching does not know it")
            raise ValueError(f"{call}: {name} is {value!r:.80}; expected none: {reason}")
    return copy.copy(config)
