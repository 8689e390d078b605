"""llama.cpp's sampler chain, through the C API that the package llama-cpp-python exports."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.sampling.peers import Filter

try:
    import llama_cpp
    import numpy as np
except ImportError:
    llama_cpp = None

WHY_NOT = "llama.cpp: not measured, llama-cpp-python is not installed (benchmarks/install_peers.sh)"


def can_sample(logits: Tensor) -> bool:
    """Tell whether the package is installed and takes such logits: float32 alone."""
    return llama_cpp is not None and logits.dtype is torch.float32


def llama_chain(logits: Tensor, filter_: Filter) -> Callable[[], Tensor]:
    """Build a step of the chain top-k, top-p, temperature, dist."""
    samplers = []
    if filter_.top_k is not None:
        samplers.append(llama_cpp.llama_sampler_init_top_k(filter_.top_k))
    if filter_.top_p is not None:
        samplers.append(llama_cpp.llama_sampler_init_top_p(filter_.top_p, 1))
    if filter_.temperature is not None:
        samplers.append(llama_cpp.llama_sampler_init_temp(filter_.temperature))
    samplers.append(llama_cpp.llama_sampler_init_dist(1))
    return chain_step(logits, samplers)


def chain_step(
    logits: Tensor, samplers: Sequence[Any], text: Sequence[int] = ()
) -> Callable[[], Tensor]:
    """Build a step of a chain whose last sampler chooses; it has accepted a text.

    The candidates are filled again for every row, as ``llama_sampler_sample`` does.
    """
    vocab = logits.shape[-1]
    candidates = np.zeros(vocab, dtype=[("id", np.int32), ("logit", np.float32), ("p", np.float32)])
    token_ids = np.arange(vocab, dtype=np.int32)
    rows = logits.numpy()
    data = ctypes.cast(candidates.ctypes.data, ctypes.POINTER(llama_cpp.llama_token_data))
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    for sampler in samplers:
        llama_cpp.llama_sampler_chain_add(chain, sampler)
    for token in text:
        llama_cpp.llama_sampler_accept(chain, token)

    def step() -> Tensor:
        tokens = []
        for row in rows:
            candidates["id"] = token_ids
            candidates["logit"] = row
            candidates["p"] = 0
            array = llama_cpp.llama_token_data_array(
                data=data, size=vocab, selected=-1, sorted=False
            )
            llama_cpp.llama_sampler_apply(chain, ctypes.byref(array))
            tokens.append(array.data[array.selected].id)
        return torch.tensor(tokens)

    return step
