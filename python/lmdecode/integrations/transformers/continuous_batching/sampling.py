"""One fused call for the tokens of all requests, in the place of processors and multinomial."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import LogitsProcessorList
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)

from lmdecode._checks import check_int, check_number
from lmdecode.generation_options import FUSED, NEUTRAL
from lmdecode.integrations.transformers.sampling.fusion import fuse_sampling, fused_stages
from lmdecode.sampling.ops import row_seed, top_k_top_p_sample

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.requests import (
        FutureRequestState,
        RequestState,
    )

ProcessorsOf = Callable[[list[int], int | None, Collection[int]], LogitsProcessorList]
# The name of a further sequence of a request ends with this and a number.
_FORK = "__child#"


class _Row(NamedTuple):
    """The numbers of a request in a step, the arguments of ``top_k_top_p_sample``."""

    seed: int
    position: int
    temperature: float
    top_p: float
    min_p: float
    top_k: int


class BatchProcessors(ContinuousBatchingLogitsProcessorList):
    """The logits processors of continuous batching, the last of which a fused op replaces.

    Temperature, top-k, top-p, min-p and the seed are each request's, or else the generation
    config's. A request's noise is a function of its seed and of the length of its text alone. Each
    processor that is not fused is called for each request by itself, with the whole of its text.
    ``processors_of`` returns the processors of ``generate()`` for a prompt, the longest text and
    end tokens. Without ``do_sample`` all processors are called, and none is fused.
    """

    def __init__(self, processors_of: ProcessorsOf, do_sample: bool) -> None:
        self._processors_of, self._do_sample = processors_of, do_sample
        called, stages = self._split(processors_of([0], 1, {0}))
        # A stage that something follows is called as it is, and is the same for all requests.
        taken = {name for item in called for name in fused_stages(item) or ()}
        super().__init__(LogitsProcessorList(), False, False)
        self.calls_any = len(called) > 0
        self._stages = {**{name: NEUTRAL[name] for name in FUSED}, **stages}
        self._names = ("seed", *(name for name in FUSED if name not in taken))
        self.tensors_required = 2 * 2 + 4 if do_sample else 0  # seed and position are of 64 bits
        self.do_processing = do_sample or self.calls_any
        self._texts: list[tuple[LogitsProcessorList, torch.Tensor]] = []
        self._arguments = torch.empty(self.tensors_required, 0, dtype=torch.int32, device="cpu")

    def _split(self, processors: LogitsProcessorList) -> tuple[LogitsProcessorList, dict[str, Any]]:
        """Return what is called, and the arguments of the op for the others."""
        fusion = fuse_sampling(processors, self._do_sample)
        return fusion.processors or LogitsProcessorList(), fusion.stages

    def check_request(self, arguments: dict[str, Any]) -> None:
        """Raise for what is no argument of a request."""
        for name, value in arguments.items():
            if name not in self._names:
                raise ValueError(
                    f"generate_batch: a request has no {name!r}; "
                    f"expected one of {', '.join(self._names)}"
                )
            if name == "seed":
                check_int("generate_batch", name, value, 0)
            elif name == "top_k":
                check_int("generate_batch", name, value, -(2**31), 2**31 - 1)
            else:
                number = check_number("generate_batch", name, value, is_finite=True)
                if number < 0 or (name != "temperature" and number > 1):
                    limits = "0 or more" if name == "temperature" else "a number from 0 to 1"
                    raise ValueError(f"generate_batch: {name} is {value}; expected {limits}")

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Called by transformers where a request is scheduled."""
        self.check_request(kwargs)

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Write what rows without a request have: greedy search of whatever is there."""
        int32_tensor.zero_()

    def prepare_tensor_args(
        self, requests_in_batch: list[FutureRequestState], arg_storage: torch.Tensor
    ) -> torch.Tensor:
        """Write the arguments of the requests that get a token, a column each."""
        states = [request.state for request in requests_in_batch if request.has_new_token]
        self._texts = [self._text(state) for state in states] if self.calls_any else []
        if states and self._do_sample:
            rows = [self._row(state) for state in states]
            seeds, positions, *floats, top_k = zip(*rows, strict=True)
            counters = torch.tensor([seeds, positions], dtype=torch.int64, device="cpu")
            halves = counters.view(torch.int32).view(2, -1, 2).transpose(1, 2).reshape(4, -1)
            bits = torch.tensor(floats, dtype=torch.float32, device="cpu").view(torch.int32)
            packed = torch.cat(
                [halves, bits, torch.tensor([top_k], dtype=torch.int32, device="cpu")]
            )
            arg_storage[:, : len(rows)] = packed.to(arg_storage.device)
        return arg_storage

    def _text(self, state: Any) -> tuple[LogitsProcessorList, torch.Tensor]:
        """Return what is called for a request, and its text [1, length]."""
        if not hasattr(state, "lmdecode_processors"):
            # A request that was put back has the tokens that it had generated behind its prompt.
            prompt = state.initial_tokens[: state._true_initial_tokens or None]
            new = state.max_new_tokens
            longest = None if new is None else len(state.initial_tokens) + new
            processors = self._processors_of(prompt, longest, state._eos_token_ids)
            state.lmdecode_processors = self._split(processors)[0]
        text = torch.tensor([state.initial_tokens + state.generated_tokens], device="cpu")
        return state.lmdecode_processors, text

    def _row(self, state: RequestState) -> _Row:
        asked = state.logit_processor_kwargs
        seed = asked["seed"]
        if _FORK in state.request_id:
            seed = row_seed(seed, 1 + int(state.request_id.rsplit(_FORK, 1)[1]))
        stages = {name: asked.get(name, self._stages[name]) for name in FUSED}
        # The tokens of this step are counted already.
        return _Row(seed=seed, position=state.position_offset, **stages)

    def __call__(
        self,
        input_ids: torch.LongTensor,
        scores: torch.Tensor,
        logits_processor_args: torch.Tensor,
    ) -> torch.Tensor:
        """Call what is not fused; ``sample`` follows with the arguments of this call."""
        self._arguments = logits_processor_args
        if not self._texts:
            return scores
        rows = [
            processors(text.to(scores.device), scores[row : row + 1])  # type: ignore[arg-type]
            for row, (processors, text) in enumerate(self._texts)
        ]
        return torch.cat([*rows, scores[len(rows) :]])

    def sample(self, return_logprobs: bool, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Write a token for each row of ``scores`` [1, rows, V], as ``ModelRunner._sample`` does.

        ``output_ids`` is [1 or 2, at least rows] int32; its second row takes log-probabilities,
        float32, in the bits of its numbers.
        """
        count = scores.size(1)
        arguments = self._arguments[:, :count]
        halves = arguments[:4].reshape(2, 2, count).transpose(1, 2).contiguous()
        seed, position = halves.view(torch.int64)[..., 0]
        temperature, top_p, min_p = arguments[4:7].contiguous().view(torch.float32)
        drawn = top_k_top_p_sample(
            scores[0],
            arguments[7].contiguous(),
            top_p,
            min_p=min_p,
            temperature=temperature,
            seed=seed,
            position=position,
            return_logprob=return_logprobs,
            dialect="transformers",
        )
        output_ids[0, :count].copy_(drawn.index)
        if return_logprobs:
            assert drawn.logprob is not None
            output_ids[1, :count].copy_(drawn.logprob.view(torch.int32))


def use_fused_sampling(runner: Any, processors: BatchProcessors) -> None:
    """Let a ``ModelRunner`` draw its tokens by ``processors``."""
    runner._sample = functools.partial(processors.sample, runner.return_logprobs)
