"""Decoding.generate(): what it cannot do is refused, and NaN is an error of its prompt."""

import itertools
from typing import Any

import pytest
import torch
from transformers import TextStreamer

import lmdecode
from tests.decoder.decoder_models import VOCAB, make_inputs, make_model, pair


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"do_sample": True, "num_beams": 2, "seed": 1}, "^seed: expected None with beams"),
        ({"num_beams": 4, "seed": 3}, "^seed: expected None with beams, got 3"),
        ({"num_beams": 4, "seed": "abc"}, "^seed: expected None with beams, got 'abc'"),
        ({"seed": [1, 2]}, "^seed: expected one number, or one for each of 3 rows; got .2."),
        ({"seed": -1}, "^seed: expected an int >= 0, got -1"),
        ({"num_beams": 0}, "^num_beams: expected at least 1, got 0"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"forced_bos_token_id": VOCAB}, "forced_bos_token_id: expected a token, 0 to 63, got 64"),
        ({"forced_eos_token_id": VOCAB}, "forced_eos_token_id: expected a token, 0 to 63, got 64"),
        ({"assistant_model": make_model("marian")}, "^assistant_model: expected None"),
        ({"custom_generate": "here"}, "custom_generate is given"),
        ({"streamer": TextStreamer(None), "num_beams": 2}, "streamer is given; .* stay in C"),
        ({"stop_strings": "w3"}, "^tokenizer: expected the model's"),
        ({"num_beams": 4, "num_beam_groups": 2}, "num_beam_groups"),
        ({"num_beams": 4, "num_beam_groups": 3, "diversity_penalty": 1.0}, "num_beam_groups"),
        ({"max_new_tokens": 97}, "max_length: expected at most 97, .* 96 positions, got 98"),
        ({"decoder_attention_mask": torch.tensor([[0], [1], [1]])}, "decoder_attention_mask"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_what_it_cannot_do_is_refused(arguments: dict[str, Any], message: str) -> None:
    _, decoding = pair("marian")
    with pytest.raises(ValueError, match=message):
        decoding.generate(**make_inputs("marian"), **{"max_new_tokens": 5, **arguments})


@pytest.mark.parametrize("kind", ["marian", "t5"])
@pytest.mark.parametrize(
    ("sources", "error", "message"),
    [
        (
            torch.empty(1, 0, dtype=torch.int64),
            ValueError,
            r"has shape \[1, 0\]; expected \[B, S\]",
        ),
        (torch.tensor([3, 4]), ValueError, r"has shape \[2\]; expected \[B, S\]"),
        ([[3, 4]], TypeError, r"is of type list; expected a tensor \[B, S\]"),
    ],
    ids=["empty", "one row", "list"],
)
def test_sources_are_a_matrix_of_tokens(
    kind: str, sources: Any, error: type[Exception], message: str
) -> None:
    _, decoding = pair(kind)
    with pytest.raises(error, match=f"^Decoding.generate: inputs {message}"):
        decoding.generate(sources)
    with pytest.raises(error, match=f"^Decoding.generate: input_ids {message}"):
        decoding.generate(input_ids=sources)


def test_nan_is_an_error_of_its_prompt() -> None:
    model = make_model("marian")
    decoding = lmdecode.Decoding.from_pretrained(model)
    inputs = make_inputs("marian")
    memory = model.get_encoder()(**inputs)
    memory.last_hidden_state[1, 0] = torch.nan
    for num_beams, bad_words_ids in itertools.product((1, 3), (None, [[3, 4]])):
        with pytest.raises(RuntimeError, match=r"step 0: .*prompt 1 has NaN in its logits$"):
            decoding.generate(
                encoder_outputs=memory,
                attention_mask=inputs["attention_mask"],
                num_beams=num_beams,
                max_new_tokens=5,
                bad_words_ids=bad_words_ids,
            )
