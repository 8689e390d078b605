"""``generate`` of transformers 4.38.2 with our scorers in the place of its own."""

from typing import Any

import pytest
import torch
from transformers.generation import utils

import lmdecode
from tests.support.tiny_models import seeded_model

VOCAB = 24
SIZES = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


_BART = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    "max_position_embeddings": 64, "decoder_start_token_id": 2, "forced_eos_token_id": 2, **SIZES,
}  # fmt: skip
_LLAMA = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 64, **SIZES,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2,
    "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, **SIZES},
    "LlamaForCausalLM": _LLAMA,
    "BartForConditionalGeneration": _BART,
    "T5ForConditionalGeneration": _T5,
}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "early stopping": {"early_stopping": True, "length_penalty": 2.0, "num_return_sequences": 3},
    "never": {"early_stopping": "never", "length_penalty": 0.7, "num_return_sequences": 4},
    "never, short": {"early_stopping": "never", "length_penalty": -1.0, "max_new_tokens": 5},
    "no penalty": {"length_penalty": 0.0, "num_return_sequences": 2},
    "end tokens": {"eos_token_id": [5, 2, 9, 11, 4], "num_return_sequences": 2},
    "groups": {"num_beam_groups": 2, "diversity_penalty": 0.5, "num_return_sequences": 4},
    "groups of one": {"num_beam_groups": 4, "diversity_penalty": 1.0, "eos_token_id": [3, 7, 8]},
    "sampled": {"do_sample": True, "top_k": 10, "num_return_sequences": 2},
    "forced end": {"forced_eos_token_id": 2, "num_return_sequences": 4},
    "few tokens allowed": {
        "prefix_allowed_tokens_fn": lambda _, ids: [len(ids) % 5 + 2],
        "num_return_sequences": 2,
    },
    "processors": {"no_repeat_ngram_size": 2, "min_new_tokens": 4, "repetition_penalty": 1.3},
    # With beam indices, transformers fails where a beam comes to the end without its phrases.
    "phrases": {
        "force_words_ids": [[7, 8], [12]],
        "num_return_sequences": 2,
        "output_scores": False,
    },
    "alternatives": {"force_words_ids": [[[7, 8, 9], [7, 9], [13]], [6, 5]]},
}


def generate(name: str, seed: int, options: dict[str, Any]) -> Any:
    model = seeded_model(name, seed, **MODELS[name])
    for parameter in model.parameters():  # untrained weights: far from uniform
        torch.nn.init.normal_(parameter, std=0.7)
    ids = torch.randint(3, VOCAB, (3, 5))
    if options.get("do_sample"):
        torch.manual_seed(seed)
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **{
            "num_beams": 4,
            "max_new_tokens": 12,
            "return_dict_in_generate": True,
            "output_scores": True,
            **options,
        },
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_generate(model: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        expected = generate(model, seed, MODES[mode])
        made: list[str] = []
        with monkeypatch.context() as patch:
            for name in ("BeamSearchScorer", "ConstrainedBeamSearchScorer"):

                def make(*args: Any, name: str = name, made: Any = made, **kwargs: Any) -> Any:
                    made.append(name)
                    return getattr(lmdecode, name)(*args, **kwargs)

                patch.setattr(utils, name, make)
            for name in ("PhrasalConstraint", "DisjunctiveConstraint"):
                patch.setattr(utils, name, getattr(lmdecode, name))
            actual = generate(model, seed, MODES[mode])
        constrained = "force_words_ids" in MODES[mode]
        assert made == ["ConstrainedBeamSearchScorer" if constrained else "BeamSearchScorer"]
        assert torch.equal(actual.sequences, expected.sequences)
        if MODES[mode].get("output_scores", True):
            assert torch.equal(actual.sequences_scores, expected.sequences_scores)
            assert torch.equal(actual.beam_indices, expected.beam_indices)
