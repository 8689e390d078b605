"""Fixtures of these tests: the tiny models, prompts, and spies on warpers and on reorders."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")

from transformers import PreTrainedModel
from window_models import build_window_model

from tests.support.releases import BEFORE_5_23
from tests.support.tiny_models import (
    BEAM_MODELS,
    DECODER_ONLY,
    ENCODER_DECODER,
    PAD,
    VOCAB,
    build_model,
)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Any:
    if BEFORE_5_23 and module_path.name.startswith("test_generate_batch"):
        return SkippedModule.from_parent(parent, path=module_path)
    return None


class SkippedModule(pytest.Module):
    def collect(self) -> Any:
        pytest.skip("transformers before 5.23 lacks the continuous batching of generate_batch")


@pytest.fixture
def make_model():
    """Return ``make_model(name, vocab_size=61, dtype=float32)``; tests share the models."""

    def make(
        name: str, vocab_size: int = VOCAB, dtype: torch.dtype = torch.float32
    ) -> PreTrainedModel:
        return build_model(name, vocab_size, dtype)

    return make


@pytest.fixture
def build() -> Iterator[Callable[[str, str], Any]]:
    """Return ``build(name, attn_implementation)`` of ``window_models``; tests share the models."""
    used = []

    def get(name: str, implementation: str) -> Any:
        used.append(build_window_model(name))
        used[-1].set_attn_implementation(implementation)
        return used[-1]

    yield get
    for model in used:
        model.set_attn_implementation("eager")


@pytest.fixture(params=DECODER_ONLY + ENCODER_DECODER)
def model(request, make_model) -> PreTrainedModel:
    return make_model(request.param)


@pytest.fixture(params=DECODER_ONLY)
def decoder_model(request, make_model) -> PreTrainedModel:
    return make_model(request.param)


@pytest.fixture(params=BEAM_MODELS)
def beam_model(request, make_model) -> PreTrainedModel:
    return make_model(request.param)


@pytest.fixture
def llama(make_model) -> PreTrainedModel:
    return make_model("llama")


@pytest.fixture
def prompts() -> torch.Tensor:
    """Return [3, 6] int64 ids without special tokens."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, VOCAB, (3, 6), generator=generator)


@pytest.fixture
def padded_prompts(prompts) -> dict[str, torch.Tensor]:
    """Return the prompts cut to 6, 4 and 1 tokens and padded on the left, with their mask."""
    ids, mask = prompts.clone(), torch.ones_like(prompts)
    for row, padding in enumerate((0, 2, 5)):
        ids[row, :padding] = PAD
        mask[row, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture
def run_synced(llama, prompts, monkeypatch) -> Callable[..., torch.Tensor]:
    """Return ``run(module, synced_gpus, **arguments)``: the others end three steps after ours."""

    def run(module: Any, synced_gpus: bool | None, **arguments: Any) -> torch.Tensor:
        forwards, extra_steps, after_end = [], 3, 0
        hook = llama.register_forward_pre_hook(lambda *_: forwards.append(None))

        def has_unfinished(this_peer_finished, synced_gpus, device):
            nonlocal after_end
            assert synced_gpus is True
            after_end += this_peer_finished
            return after_end <= extra_steps

        monkeypatch.setattr(llama, "_has_unfinished_sequences", has_unfinished)
        monkeypatch.setattr(module, "needs_synced_gpus", lambda model: True)
        try:
            got = llama.generate(prompts, **arguments, synced_gpus=synced_gpus)
        finally:
            hook.remove()
            monkeypatch.undo()
        assert len(forwards) == arguments["max_new_tokens"] + extra_steps
        return got

    return run


class WarperSpy:
    """Counts how often transformers' own last steps run."""

    def __init__(self) -> None:
        self.op_calls: list[tuple[torch.Tensor, dict]] = []
        self.multinomial_calls = 0
        self.warper_calls = 0


@pytest.fixture
def spy(monkeypatch) -> WarperSpy:
    """Watch the fused op, ``torch.multinomial`` and the four warpers."""
    from transformers.generation import logits_process

    import lmdecode
    from lmdecode.integrations.transformers.sampling import logits_process as ours
    from lmdecode.integrations.transformers.sampling import loop

    seen = WarperSpy()
    op, multinomial = lmdecode.top_k_top_p_sample, torch.multinomial

    def counted_op(logits, *args, **kwargs):
        assert not args
        seen.op_calls.append((logits, kwargs))
        return op(logits, **kwargs)

    def counted_multinomial(*args, **kwargs):
        seen.multinomial_calls += 1
        return multinomial(*args, **kwargs)

    for module in (loop, ours):
        monkeypatch.setattr(module, "top_k_top_p_sample", counted_op)
    monkeypatch.setattr(torch, "multinomial", counted_multinomial)
    for name in ("Temperature", "TopK", "TopP", "MinP"):
        warper = getattr(logits_process, f"{name}LogitsWarper")
        monkeypatch.setattr(warper, "__call__", _counted_call(seen, warper.__call__))
    return seen


def _counted_call(seen: WarperSpy, original):
    # transformers counts the parameters of a processor's __call__, so it has no others.
    def call(self, input_ids, scores):
        seen.warper_calls += 1
        return original(self, input_ids, scores)

    return call


@pytest.fixture
def calls(monkeypatch) -> list[list[torch.Tensor]]:
    """The tensors of each call of reorder_cache_ by a cache for beam search."""
    import lmdecode
    from lmdecode.integrations.transformers.caches import beam_caches, beam_layers

    seen: list[list[torch.Tensor]] = []

    def counted(tensors, parents, **options):
        seen.append(list(tensors))
        lmdecode.reorder_cache_(tensors, parents, **options)

    monkeypatch.setattr(beam_caches, "reorder_cache_", counted)
    monkeypatch.setattr(beam_layers, "reorder_cache_", counted)
    return seen
