"""What others run for a step with penalties, biases, a grammar's mask and further filters."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.sampling import llama_cpp_peer, peers


class Edits(NamedTuple):
    """What comes before the filters, the same in every row.

    Attributes
    ----------
    prompt, output
        Tokens of the text.
    biases
        Of tokens.
    allowed
        [vocab] bool.
    repetition, frequency, presence
        Penalties.
    """

    prompt: list[int]
    output: list[int]
    biases: dict[int, float]
    allowed: Tensor
    repetition: float = 1.1
    frequency: float = 0.05
    presence: float = 0.1


def has_vllm() -> bool:
    """Tell whether vLLM is installed; its sampler is torch code, which runs on CPUs too."""
    return importlib.util.find_spec("vllm") is not None


def transformers_with_edits(
    logits: Tensor, edits: Edits, top_k: int, top_p: float, min_p: float
) -> Callable[[], Tensor]:
    """Build processors and warpers of ``generate()``, which has no counts of the output."""
    from transformers.generation import logits_process

    banned = ~edits.allowed
    chain: list[peers.Processor] = [
        logits_process.SequenceBiasLogitsProcessor({(t,): b for t, b in edits.biases.items()}),
        logits_process.RepetitionPenaltyLogitsProcessor(edits.repetition),
        lambda _, scores: scores.masked_fill(banned, -torch.inf),
        logits_process.TopKLogitsWarper(top_k),
        logits_process.TopPLogitsWarper(top_p),
        logits_process.MinPLogitsWarper(min_p),
    ]
    text = torch.tensor([edits.prompt + edits.output]).expand(len(logits), -1).contiguous()
    return peers.processed_draw(logits, chain, text)


def llama_with_edits(
    logits: Tensor, edits: Edits, top_k: int, top_p: float, min_p: float
) -> Callable[[], Tensor]:
    """Build a chain of llama.cpp, without the mask: its grammars are made of text."""
    lib: Any = llama_cpp_peer.llama_cpp
    biases = (lib.llama_logit_bias * len(edits.biases))(*edits.biases.items())
    vocab, text = logits.shape[-1], edits.prompt + edits.output
    penalties = (vocab, len(text), edits.repetition, edits.frequency, edits.presence)
    samplers = [
        lib.llama_sampler_init_logit_bias(vocab, len(biases), biases),
        lib.llama_sampler_init_penalties(*penalties),
        lib.llama_sampler_init_top_k(top_k),
        lib.llama_sampler_init_top_p(top_p, 1),
        lib.llama_sampler_init_min_p(min_p, 1),
        lib.llama_sampler_init_dist(1),
    ]
    return llama_cpp_peer.chain_step(logits, samplers, text)


def vllm_with_edits(
    logits: Tensor, edits: Edits, top_k: int, top_p: float, min_p: float
) -> Callable[[], Tensor]:
    """Build vLLM's sampler as a whole, with the torch code that GPUs without Triton run."""
    from vllm.v1.sample.logits_processor import LogitsProcessors, builtin
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    batch = len(logits)
    # Their constructors want the config of an engine.
    least = builtin.MinPLogitsProcessor.__new__(builtin.MinPLogitsProcessor)
    least.min_p, least.min_p_count = torch.full((batch, 1), min_p), batch
    bias = builtin.LogitBiasLogitsProcessor.__new__(builtin.LogitBiasLogitsProcessor)
    bias.biases = dict.fromkeys(range(batch), edits.biases)
    tokens = torch.tensor(list(edits.biases))
    bias.logits_slice = (torch.arange(batch).repeat_interleave(len(tokens)), tokens.repeat(batch))
    bias.bias_tensor = torch.tensor(list(edits.biases.values())).repeat(batch)
    metadata = SamplingMetadata(
        temperature=torch.ones(batch),
        all_greedy=False,
        all_random=True,
        top_p=torch.full((batch,), top_p),
        top_k=torch.full((batch,), top_k),
        generators={},
        max_num_logprobs=None,
        no_penalties=False,
        prompt_token_ids=torch.tensor([edits.prompt]).expand(batch, -1).contiguous(),
        frequency_penalties=torch.full((batch,), edits.frequency),
        presence_penalties=torch.full((batch,), edits.presence),
        repetition_penalties=torch.full((batch,), edits.repetition),
        output_token_ids=[edits.output] * batch,
        allowed_token_ids_mask=(~edits.allowed).expand(batch, -1).contiguous(),
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors([least, bias]),
    )
    sampler = Sampler()
    # Not its kernel for CPUs: that is C++, and part of another build.
    sampler.topk_topp_sampler.forward = sampler.topk_topp_sampler.forward_native
    return lambda: sampler(logits.clone(), metadata).sampled_token_ids


def llama_stage(logits: Tensor, name: str, value: float) -> Callable[[], Tensor]:
    """Build a chain of llama.cpp with one stage, and the draw."""
    lib: Any = llama_cpp_peer.llama_cpp
    if name == "mirostat_tau":  # draws itself
        samplers = [lib.llama_sampler_init_mirostat_v2(1, value, 0.1)]
    else:
        stage = {
            "typical_p": lambda: lib.llama_sampler_init_typical(value, 1),
            "top_n_sigma": lambda: lib.llama_sampler_init_top_n_sigma(value),
            "xtc_threshold": lambda: lib.llama_sampler_init_xtc(1.0, value, 1, 1),
        }[name]()
        samplers = [stage, lib.llama_sampler_init_dist(1)]
    return llama_cpp_peer.chain_step(logits, samplers)


def transformers_stage(logits: Tensor, name: str, value: float) -> Callable[[], Tensor]:
    """Build one warper of transformers, softmax and multinomial."""
    from transformers.generation import logits_process

    stage = {
        "typical_p": logits_process.TypicalLogitsWarper,
        "epsilon_cutoff": logits_process.EpsilonLogitsWarper,
        "eta_cutoff": logits_process.EtaLogitsWarper,
    }[name](value)
    return peers.processed_draw(logits, [stage], torch.zeros(len(logits), 1, dtype=torch.int64))
