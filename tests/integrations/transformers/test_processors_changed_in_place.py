"""Tensors of logits processors that are changed in place between the steps of a search."""

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import SuppressTokensLogitsProcessor

import lmdecode
from lmdecode.integrations.transformers.beam.fused_processors import FusedProcessors


@pytest.mark.parametrize("is_inference", [False, True])
def test_change_in_place_is_seen_in_the_next_step(is_inference: bool) -> None:
    input_ids, logits = torch.tensor([[1, 2]]), torch.arange(9.0).view(1, 9)
    with torch.inference_mode(is_inference):
        processor = SuppressTokensLogitsProcessor([8])
        fused = FusedProcessors(LogitsProcessorList([processor]))

        def best_token() -> int:
            arguments = fused.arguments(input_ids, 9)
            found = lmdecode.log_softmax_top_k(logits, torch.zeros(1), 1, num_beams=1, **arguments)
            return int(found.tokens)

        assert best_token() == 7
        rules = fused._arguments
        assert best_token() == 7
        assert fused._arguments is rules  # not made again where nothing has changed
        processor.suppress_tokens.fill_(3)
        assert best_token() == 8
