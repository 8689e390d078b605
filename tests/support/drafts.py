"""Models that draft for others, which they nearly equal."""

import copy
import functools
from typing import Any

import pytest
import torch

import lmdecode
from lmdecode.decoder.causal_caches import CausalCaches
from tests.support.causal_models import random_model

__all__ = ["counted", "decoding_of", "noisy", "padded"]


@functools.cache
def decoding_of(architecture: str, variant: str, **options: Any) -> lmdecode.Decoding:
    """Return the packed model of one of ``CASES``; tests share it."""
    return lmdecode.Decoding.from_pretrained(random_model(architecture, variant), **options)


@functools.cache
def noisy(architecture: str, variant: str, size: float = 0.1, **options: Any) -> lmdecode.Decoding:
    """Return a model of one of ``CASES`` with other weights: those and noise of this size."""
    model = copy.deepcopy(random_model(architecture, variant))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += size * parameter.std() * noise if parameter.numel() > 1 else 0.0
    return lmdecode.Decoding.from_pretrained(model, **options)


@functools.cache
def padded(architecture: str, variant: str, vocab: int, **options: Any) -> lmdecode.Decoding:
    """Return a model of one of ``CASES`` with more or fewer tokens; the new ones are likely."""
    model = copy.deepcopy(random_model(architecture, variant))
    had = model.config.vocab_size
    model.resize_token_embeddings(vocab, mean_resizing=False)
    with torch.no_grad():
        for part in (model.get_input_embeddings(), model.get_output_embeddings()):
            part.weight[had:] = 9.0 * part.weight[: max(0, vocab - had)]
    return lmdecode.Decoding.from_pretrained(model, **options)


def counted(monkeypatch: pytest.MonkeyPatch, model: Any) -> list[int]:
    """Count the logits of each step of a model from here on."""
    steps: list[int] = []
    forward = CausalCaches.forward

    def count(self: CausalCaches, tokens: Any, entries: Any, num_logits: int, **rows: Any) -> Any:
        if self.model is model:
            steps.append(num_logits)
        return forward(self, tokens, entries, num_logits, **rows)

    monkeypatch.setattr(CausalCaches, "forward", count)
    return steps
