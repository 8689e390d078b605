"""The dialect "generate" against transformers' own ``generate(num_beams=...)``, whole searches."""

import random
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel
from transformers.utils import logging

import lmdecode
from lmdecode import beam_parameters, new_beam_state
from lmdecode.reference import beam_rules as reference
from tests.support.tiny_models import seeded_model

VOCAB = 50


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    logging.set_verbosity_error()
    return seeded_model(
        "GPT2LMHeadModel", vocab_size=VOCAB, n_layer=1, n_head=2, n_embd=16, n_positions=64,
        bos_token_id=0, eos_token_id=1, attn_implementation="eager",
    )  # fmt: skip


def searched(
    model: GPT2LMHeadModel, ids: torch.Tensor, num_beams: int, new: int, options: dict[str, Any],
    implementation: Any, best: Any,
) -> tuple[Any, int]:  # fmt: skip
    """Drive a search by beam_step; return the final result and the steps."""
    batch, prompt = ids.shape
    ends = options["end_tokens"]
    length = prompt + new
    state = new_beam_state(
        batch, num_beams, length, keep_beam_indices=True, keep_log_probs=True
    )  # fmt: skip
    parameters = beam_parameters(
        batch, num_beams, prompt_lengths=prompt, max_lengths=length, pad_tokens=ends[0], **options
    )
    state.sequences[:, :, :prompt] = ids[:, None]
    state.lengths.fill_(prompt)
    state.scores[:, 1:] = -1e9
    steps = 0
    while not bool(state.done.all()):
        rows = state.sequences[:, :, : prompt + steps].reshape(batch * num_beams, -1)
        log_probs = model(rows).logits[:, -1].log_softmax(-1).view(batch, num_beams, VOCAB)
        flat = (log_probs + state.scores[:, :, None]).view(batch, -1)
        scores, index = flat.sort(descending=True, stable=True)
        index = index[:, : max(2, 1 + len(ends)) * num_beams]
        implementation(
            state, parameters, scores[:, : index.shape[1]], index % VOCAB, index // VOCAB,
            log_probs=log_probs.view(batch, -1).gather(1, index),
        )  # fmt: skip
        steps += 1
    return best(state, parameters, num_beams), steps


@pytest.mark.parametrize("implementation", ["op", "reference"])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@torch.no_grad()
def test_generate(
    model: GPT2LMHeadModel, length_penalty: float, early_stopping: Any, implementation: str
) -> None:
    step = lmdecode.beam_step if implementation == "op" else reference.beam_step
    best = lmdecode.beam_finalize if implementation == "op" else reference.beam_finalize
    for seed in range(12 if implementation == "op" else 3):
        choice = random.Random(f"{seed}/{early_stopping}/{length_penalty}")
        torch.manual_seed(choice.getrandbits(40))
        torch.nn.init.normal_(model.transformer.wte.weight, std=1.0)
        num_beams, new = choice.choice([2, 3, 5]), choice.choice([1, 3, 9])
        ids = torch.randint(8, VOCAB, (choice.choice([1, 2, 3]), choice.choice([1, 4])))
        ends = choice.choice([[1], [1, 2], [1, 2, 3, 4, 5, 6, 7]])
        want = model.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=num_beams, max_new_tokens=new,
            length_penalty=length_penalty, early_stopping=early_stopping, eos_token_id=ends,
            pad_token_id=0, num_return_sequences=num_beams, do_sample=False,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        options = dict(
            end_tokens=ends, length_penalty=length_penalty, early_stopping=early_stopping
        )
        final, steps = searched(model, ids, num_beams, new, options, step, best)
        longest = int(final.lengths.max())
        rows, prompt = ids.shape[0] * num_beams, ids.shape[1]
        assert steps == len(want.scores)
        assert torch.equal(final.sequences[..., :longest].reshape(rows, -1), want.sequences)
        torch.testing.assert_close(
            final.scores.float().reshape(-1), want.sequences_scores, rtol=1e-5, atol=1e-5
        )
        indices = final.beam_indices[..., prompt:longest]
        first = torch.arange(len(ids), dtype=torch.int32)[:, None, None] * num_beams
        indices = indices + torch.where(indices >= 0, first, 0)
        assert torch.equal(indices.reshape(rows, -1), want.beam_indices.int())
        # The log-probs of a sequence sum up to its score, before the penalty.
        divisor = (final.lengths - prompt).double() ** length_penalty
        torch.testing.assert_close(
            final.log_probs.double().sum(-1) / divisor, final.scores, rtol=1e-4, atol=1e-4
        )
