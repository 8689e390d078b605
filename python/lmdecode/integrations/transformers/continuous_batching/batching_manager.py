"""``generate_batch``: transformers' continuous batching on lmdecode's attention and sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from lmdecode._checks import MAX_INT, check_int, is_list
from lmdecode.integrations.transformers.continuous_batching.attention import NAME, register_flash
from lmdecode.integrations.transformers.continuous_batching.sampling import (
    FusedProcessors,
    use_fused_sampling,
)
from lmdecode.integrations.transformers.continuous_batching.stored_prefixes import (
    StoredPrefixes,
    check_prefix_store,
)
from lmdecode.sampling.ops import row_seed

if TYPE_CHECKING:
    from transformers import GenerationConfig

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
        For a seed that is none, for a processor's argument that a request cannot have, and for a
        store of another model.
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
        config = generation_config or model.generation_config
        if config.eos_token_id is None:  # as init_continuous_batching has it
            config.eos_token_id = -1
        batching = continuous_batching_config or ContinuousBatchingConfig()
        if store is not None:
            check_prefix_store(_CALL, model, batching, store)
        self._store = store
        super().__init__(model, config, batching)
        self._processors: FusedProcessors | None = None
        if config.do_sample:
            self._processors = FusedProcessors(
                model._get_logits_processor(config), batching.drop_unsupported_processors
            )
            self.logit_processor = self._processors

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
        own = {"max_new_tokens", "streaming", "record_timestamps", "eos_token_id"}
        asked = {name: value for name, value in arguments.items() if name not in own}
        if self._processors is None:
            if asked:
                raise ValueError(
                    f"{_CALL}: a request has {', '.join(map(repr, asked))}, and the generation "
                    "config has do_sample=False; expected no argument of sampling"
                )
            return super().add_request(input_ids, request_id, *args, **arguments)
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
        return super().add_request(input_ids, request_id, *args, **arguments)

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
        Further ones of ``model.generate_batch``: ``max_new_tokens``, ``progress_bar``, ...

    Returns
    -------
    dict
        ``GenerationOutput`` of each request by its name, in the order of ``inputs``.

    Raises
    ------
    ValueError, TypeError
        For a seed that is none, one that does not fit the prompts, a store of another model, and
        ``persistent_manager``.
    RuntimeError
        Where the model keeps a manager of continuous batching already.
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
    original = model.config._attn_implementation
    try:
        manager = BatchingManager(
            model, generation_config, continuous_batching_config, seed=seeds, store=store
        )
        # transformers takes the manager that it finds here, and none of another class otherwise.
        model._cached_continuous_batching_manager = manager
        return model.generate_batch(inputs, manager.generation_config, **arguments)
    finally:
        vars(model).pop("_cached_continuous_batching_manager", None)
        if NAME == model.config._attn_implementation != original:  # the manager has not started
            model.set_attn_implementation(original)
