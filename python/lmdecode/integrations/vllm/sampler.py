"""vLLM's last step on CPUs, from filtered logits to tokens, as one op."""

from __future__ import annotations

import importlib
import inspect
import os
import warnings
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lmdecode._checks import MAX_INT
from lmdecode.sampling import top_k_top_p_sample

SWITCH = "LMDECODE_VLLM_SAMPLER"
"""Name of the environment variable that switches the plug-in off: "0"."""

_MODULE = "vllm.v1.sample.ops.topk_topp_sampler"
# Of vLLM's method, whose place ours takes; attributes of its class that ours reads.
_PARAMETERS = ("self", "logits", "generators", "k", "p")
_ATTRIBUTES = ("logprobs_mode", "use_fp64_gumbel")
_GENERATOR_STEP = 4  # so far vLLM takes a generator back where a draw is thrown away


class RowNoise(torch.Generator):
    """The position of one request in its noise, kept where vLLM keeps a request's generator.

    vLLM draws from rows whose prompts are not yet read to their ends too, throws these tokens away,
    and takes the generators back by their offsets, which generators of CPUs do not have. This class
    has them: ``position`` counts the tokens drawn with ``seed_of_row``.
    """

    seed_of_row: int
    position: int

    @staticmethod
    def of(generator: torch.Generator) -> RowNoise:
        """Return the noise of a request, by the generator that vLLM made for it."""
        if isinstance(generator, RowNoise):
            return generator
        noise = _noise_of.get(generator)
        if noise is None:
            noise = RowNoise()
            # For who draws by other means, as vLLM's rejection of drafts does.
            noise.set_state(generator.get_state())
            noise.seed_of_row = generator.initial_seed() & MAX_INT
            noise.position = 0
            _noise_of[generator] = noise
        return noise

    def get_offset(self) -> int:
        return self.position * _GENERATOR_STEP

    def set_offset(self, offset: int) -> RowNoise:
        self.position = offset // _GENERATOR_STEP
        return self


# vLLM puts a request's own generator back when it goes on after a preemption.
_noise_of: WeakKeyDictionary[torch.Generator, RowNoise] = WeakKeyDictionary()


def draw(
    logits: Tensor,
    generators: dict[int, torch.Generator],
    top_k: Tensor | None,
    top_p: Tensor | None,
    return_logits: bool,
) -> tuple[Tensor, Tensor | None]:
    """Draw a token for every row: [rows] int64 tokens, and the filtered logits or None.

    ``logits`` are [rows, vocab] float32, divided by their temperatures; top-k is int and top-p
    float32, None for off. ``generators`` holds those of requests with a seed; each is replaced by
    its ``RowNoise``, whose noise follows from the seed and the number of tokens drawn before. So
    tokens do not depend on the batch, on how a prompt is cut into chunks, or on preemption.
    """
    rows = len(logits)
    # Of rows without a seed: from torch's generator, which vLLM seeds when it starts.
    seeds = torch.randint(0, MAX_INT, (rows,), dtype=torch.int64, device="cpu")
    positions = torch.zeros(rows, dtype=torch.int64, device="cpu")
    for row, generator in list(generators.items()):
        generators[row] = noise = RowNoise.of(generator)
        seeds[row], positions[row] = noise.seed_of_row, noise.position
        noise.position += 1
    out = top_k_top_p_sample(
        logits, top_k, top_p, seed=seeds, position=positions, return_logits=return_logits,
        dialect="vllm",
    )  # fmt: skip
    return out.index, out.kept_logits


def register() -> None:
    """Let vLLM draw its tokens by lmdecode's op, on CPUs. vLLM calls it.

    ``LMDECODE_VLLM_SAMPLER=0`` in the environment leaves vLLM as it is, and so do a vLLM whose
    sampler has another form and torch 2.11, with a ``RuntimeWarning``. Done again it does nothing.

    Raises
    ------
    ImportError
        vLLM is not installed.
    """
    if os.environ.get(SWITCH, "1") == "0":
        return
    module = importlib.import_module(_MODULE)
    sampler: Any = getattr(module, "TopKTopPSampler", None)
    stock: Any = getattr(sampler, "forward_cpu", None)
    processed = getattr(module, "PROCESSED_LOGPROBS_MODES", None)
    if getattr(stock, "is_lmdecode", False):
        return
    if processed is None or not _is_known(sampler, stock):
        warnings.warn(
            f"lmdecode does not know the sampler of this vLLM ({_MODULE}), and leaves it as it is; "
            f"{SWITCH}=0 in the environment ends this warning",
            RuntimeWarning,
            stacklevel=2,
        )
        return

    if not torch.Generator.__weakrefoffset__:
        warnings.warn(
            "lmdecode's sampler needs generators that can be referenced weakly, as torch 2.13 has "
            f"them, and leaves vLLM as it is with torch {torch.__version__}; {SWITCH}=0 in the "
            "environment ends this warning",
            RuntimeWarning,
            stacklevel=2,
        )
        return

    def forward_cpu(
        self: Any,
        logits: Tensor,
        generators: dict[int, torch.Generator],
        k: Tensor | None,
        p: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Filter and draw by lmdecode's op: lmdecode.integrations.vllm."""
        if self.use_fp64_gumbel:  # a wish for that noise
            result: tuple[Tensor, Tensor | None] = stock(self, logits, generators, k, p)
            return result
        tokens, kept = draw(logits, generators, k, p, self.logprobs_mode in processed)
        if kept is not None and self.logprobs_mode == "processed_logprobs":
            kept = kept.log_softmax(dim=-1, dtype=torch.float32)
        return tokens, kept

    forward_cpu.is_lmdecode = True  # type: ignore[attr-defined]
    sampler.forward_cpu = forward_cpu


def _is_known(sampler: Any, stock: Any) -> bool:
    """Tell whether vLLM's sampler has what ours needs of it, and takes what ours takes."""
    if not inspect.isfunction(stock):
        return False
    known = set(inspect.signature(sampler.__init__).parameters)
    return tuple(inspect.signature(stock).parameters) == _PARAMETERS and known >= set(_ATTRIBUTES)
