"""SGLang's draw of tokens, from probabilities to ids, as lmdecode's op."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers import sampler as stock
from torch import Tensor

from lmdecode._checks import MAX_INT
from lmdecode.sampling import top_k_top_p_sample

BACKEND = "lmdecode"


def draw(
    probs: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seed: Tensor | None,
    position: Tensor | None,
    return_support: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Draw a token for every row, by SGLang's rules: int32 tokens, [rows].

    Top-k and top-p look at the same distribution, and a token must pass both; min-p looks at what
    is left. None turns a filter off. ``probs`` is [rows, vocab] float32 after the softmax and does
    not change. The noise of a request with a seed follows from ``seed`` and ``position`` alone;
    without one it comes from torch's generator. With ``return_support`` the second result is
    ``probs`` with 0 where a token was dropped, else None.
    """
    logits = probs.log()
    vocab = probs.shape[1]
    if top_k is not None:
        top_k = top_k.clamp(max=vocab).long()
    if top_k is not None and top_p is not None:
        # Both keep the most probable tokens: the smaller number of them passes both.
        count = top_k_top_p_sample(logits, top_p=top_p.float(), greedy=True).kept_count
        top_k, top_p = torch.minimum(top_k, count.long()), None
    if seed is None:
        seed = torch.randint(0, MAX_INT, (len(probs),), dtype=torch.int64, device="cpu")
        position = torch.zeros_like(seed)
    assert position is not None
    out = top_k_top_p_sample(
        logits,
        top_k,
        None if top_p is None else top_p.float(),
        min_p=None if min_p is None else min_p.float(),
        seed=seed.long() & MAX_INT,
        position=position.long(),
        return_logits=return_support,
    )
    support = None
    if out.kept_logits is not None:
        support = torch.where(out.kept_logits > -torch.inf, probs, 0.0)
    return out.index.to(torch.int32), support


class LmdecodeSampler(stock.Sampler):
    """SGLang's sampler, with lmdecode's op for the draw; the rest is SGLang's."""

    def _sample_from_probs(
        self, probs: Tensor, sampling_info: Any, positions: Tensor, simple_sampling_case: bool
    ) -> tuple[Tensor, Any]:
        info = sampling_info
        rows = info.sampling_mask_batch_indices
        tokens, support = draw(
            probs,
            info.top_ks if info.need_top_k_sampling else None,
            info.top_ps if info.need_top_p_sampling else None,
            info.min_ps if info.need_min_p_sampling else None,
            info.sampling_seed,
            positions,
            return_support=rows is not None,
        )
        if support is None:
            return tokens, None
        weights, chosen = support.index_select(0, rows), tokens.index_select(0, rows)
        selected = torch.gather(weights, 1, chosen.long().unsqueeze(1)).squeeze(1)
        return tokens, stock._SamplingMaskCapture(weights, None, selected, rows)


def register() -> None:
    """Add the backend to SGLang's; done again it does nothing."""
    if stock._CUSTOM_SAMPLER_FACTORIES.get(BACKEND) is not LmdecodeSampler:
        stock.register_sampler_backend(BACKEND, LmdecodeSampler)
