"""Wrong calls of decoders and of Decoding.generate(): each error names what came and was due."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from transformers import TextStreamer

import lmdecode
from lmdecode import BeamRequest, DecoderLayer, Decoding, gather_tree
from lmdecode.models.configs import DecoderConfig
from tests.decoder.decoder_models import VOCAB, make_inputs, make_model, pair
from tests.decoder.random_decoder import random_decoder
from tests.support.op_contract import WrongCall, assert_refused, wrong_calls

CONFIG, WEIGHTS = random_decoder("post_norm")
RMS_CONFIG, RMS_WEIGHTS = random_decoder("rms")
EMBEDDING, LAYER = WEIGHTS.embedding, WEIGHTS.layers[0]
MEMORY, LENGTHS = torch.zeros(2, 5, 18), torch.tensor([5, 3])
X, POSITIONS = torch.zeros(4, 22), torch.zeros(4, dtype=torch.int64)
IDS = torch.zeros(2, 1, 2, dtype=torch.int64)


def config(**changes: Any) -> DecoderConfig:
    return dataclasses.replace(CONFIG, **changes)


def decoding(**changes: Any) -> Decoding:
    return Decoding(CONFIG, WEIGHTS._replace(**changes))


def first_layer(**changes: Any) -> Decoding:
    return decoding(layers=(LAYER._replace(**changes), WEIGHTS.layers[1]))


def add(memory: Any = MEMORY[0], **changes: Any) -> None:
    batch = Decoding(CONFIG, WEIGHTS).batch(max_requests=1, num_beams=2, capacity=9, source=5)
    request: dict[str, Any] = dict(prompt_ids=[1], num_beams=2, max_new_tokens=4)
    try:
        batch.add(BeamRequest(**request | changes), memory)
    finally:
        assert batch.free_places == 1


def new_caches(memory: Any = MEMORY, lengths: Any = LENGTHS, rows: Any = 4, capacity: Any = 6):
    return DecoderLayer(CONFIG, LAYER).new_caches(memory, lengths, rows, capacity)


def layer(x: Any = X, positions: Any = POSITIONS, caches: Any = None, **arguments: Any) -> None:
    DecoderLayer(CONFIG, LAYER)(
        x, new_caches() if caches is None else caches, positions, **arguments
    )


def tree(ids: Any = IDS, parents: Any = IDS, lengths: Any = None, end: Any = 9) -> None:
    gather_tree(ids, parents, torch.tensor([2]) if lengths is None else lengths, end)


WRONG = [
    ("head_size is 0; expected 1", lambda: config(head_size=0, attention_scale=None)),
    (
        "head_size is of type str; expected an int",
        lambda: config(head_size="8", attention_scale=None),
    ),
    (
        "1048576 heads of 1048576; expected fewer",
        lambda: config(num_heads=1 << 20, head_size=1 << 20),
    ),
    ("gated is of type str; expected a bool", lambda: config(gated="yes")),
    (r"norm is \['rms_norm'\]; expected one of", lambda: config(norm=["rms_norm"])),
    ("norm_epsilon is of type str; expected a number", lambda: config(norm_epsilon="1e-5")),
    (
        "norm_epsilon is -1.0; expected a finite number of at least 0",
        lambda: config(norm_epsilon=-1.0),
    ),
    (
        "embedding_scale is inf; expected a finite number",
        lambda: config(embedding_scale=float("inf")),
    ),
    ("config is of type NoneType", lambda: Decoding(None, WEIGHTS)),
    ("weights is of type NoneType", lambda: Decoding(CONFIG, None)),
    (
        "dtype is of type list; expected a str or a torch.dtype",
        lambda: Decoding(CONFIG, WEIGHTS, dtype=["int8"]),
    ),
    ("embedding is of type NoneType", lambda: decoding(embedding=None)),
    (
        r"embedding has shape \[39, 22\]; expected \[40, 22\]",
        lambda: decoding(embedding=EMBEDDING[1:]),
    ),
    ("embedding has dtype int64; expected floats", lambda: decoding(embedding=EMBEDDING.long())),
    ("embedding has dtype complex64; expected floats", lambda: decoding(embedding=EMBEDDING * 1j)),
    ("embedding is on meta", lambda: decoding(embedding=EMBEDDING.to("meta"))),
    ("embedding has layout torch.sparse_coo", lambda: decoding(embedding=EMBEDDING.to_sparse())),
    (
        r"positions has shape \[90, 21\]; expected \[any, 22\]",
        lambda: decoding(positions=torch.zeros(90, 21)),
    ),
    (r"positions has shape \[0, 22\]", lambda: decoding(positions=torch.zeros(0, 22))),
    ("positions has 2 rows; expected more than 2", lambda: decoding(positions=torch.zeros(2, 22))),
    (
        r"relative_bias has shape \[4, 64\]; expected \[3, any\]",
        lambda: decoding(relative_bias=torch.zeros(4, 64)),
    ),
    (r"relative_bias has shape \[3\]", lambda: decoding(relative_bias=torch.zeros(3))),
    (r"logits_bias has shape \[0\]; expected \[40\]", lambda: decoding(logits_bias=torch.zeros(0))),
    (
        r"embedding_norm_gamma has shape \[21\]; expected \[22\]",
        lambda: decoding(embedding_norm_gamma=torch.zeros(21)),
    ),
    (
        "final_norm_beta is a tensor; expected None without its gamma",
        lambda: decoding(final_norm_beta=torch.zeros(22)),
    ),
    (
        "final_norm_beta is a tensor; expected None with norm='rms_norm'",
        lambda: Decoding(RMS_CONFIG, RMS_WEIGHTS._replace(final_norm_beta=torch.zeros(22))),
    ),
    ("a layer is of type str; expected LayerWeights", lambda: decoding(layers=("a", "b"))),
    ("qkv is of type list", lambda: first_layer(qkv=[1.0])),
    (r"qkv_bias has shape \[0\]; expected \[90\]", lambda: first_layer(qkv_bias=torch.zeros(0))),
    (r"self_norm_gamma has shape \[21\]", lambda: first_layer(self_norm_gamma=torch.zeros(21))),
    (
        "ffn_gate_bias is a tensor; expected None with gated=False",
        lambda: first_layer(ffn_gate_bias=torch.zeros(34)),
    ),
    ("memory has dtype int64; expected floats", lambda: add(MEMORY[0].long())),
    ("memory has dtype complex64", lambda: add(MEMORY[0] * 1j)),
    ("memory is on meta", lambda: add(MEMORY[0].to("meta"))),
    ("memory has layout", lambda: add(MEMORY[0].to_sparse())),
    (r"pad_token_id.* is \[40\]; expected tokens below 40", lambda: add(pad_token_id=40)),
    (r"forced_bos_token_id is \[40\]", lambda: add(forced_bos_token_id=40)),
    (r"forced_eos_token_id is \[40\]", lambda: add(forced_eos_token_id=40)),
    (
        f"max_steps is {1 << 63}",
        lambda: (
            Decoding(CONFIG, WEIGHTS)
            .batch(max_requests=1, num_beams=1, capacity=9, source=5)
            .step(1 << 63)
        ),
        ValueError,
    ),
    ("memory is of type list", lambda: new_caches([1.0])),
    (r"memory has shape \[5, 18\]; expected \[requests, source, 18", lambda: new_caches(MEMORY[0])),
    ("memory is on meta", lambda: new_caches(MEMORY.to("meta"))),
    ("memory_lengths is of type list", lambda: new_caches(lengths=[5, 3])),
    ("rows is -1; expected 0", lambda: new_caches(rows=-1)),
    ("capacity is of type float", lambda: new_caches(capacity=6.0)),
    ("from_tensor is of type list", lambda: layer([1.0])),
    (r"from_tensor has shape \[\]", lambda: layer(X[0, 0])),
    ("from_tensor has layout", lambda: layer(X.to_sparse())),
    ("from_tensor requires a gradient", lambda: layer(X.clone().requires_grad_())),
    ("caches is of type list", lambda: layer(caches=[1])),
    ("positions has dtype float32; expected integers", lambda: layer(positions=POSITIONS + 0.7)),
    ("positions is .*; expected 0 to 2.31 - 1", lambda: layer(positions=POSITIONS + (1 << 32))),
    ("positions is on meta; expected cpu", lambda: layer(positions=POSITIONS.to("meta"))),
    ("requests is .*; expected 0 to 2.31 - 1", lambda: layer(requests=POSITIONS - (1 << 32))),
    (
        r"relative_bias has shape \[4, 9\]; expected \[3, any\]",
        lambda: DecoderLayer(CONFIG, LAYER, torch.zeros(4, 9)),
    ),
    ("a layer is of type NoneType", lambda: DecoderLayer(CONFIG, None)),
    ("step_ids has layout", lambda: tree(IDS.to_sparse())),
    ("end_token is 1180591620717411303424", lambda: tree(end=1 << 70)),
    (
        "end_token is 4294967297; expected an int32",
        lambda: tree(IDS.int(), IDS.int(), torch.tensor([2]).int(), (1 << 32) + 1),
    ),
]


@wrong_calls(WRONG)
def test_wrong_calls(wrong: WrongCall) -> None:
    assert_refused(wrong)


def test_dense_tensors_of_any_kind_are_taken() -> None:
    """Strided, expanded, negated, of another dtype: all the same as a copy."""
    generator = torch.Generator().manual_seed(0)
    memory = torch.randn(5, 18, generator=generator)
    request = BeamRequest([1], num_beams=2, max_new_tokens=4)
    results = []
    for given in (memory, memory.T.contiguous().T, torch._neg_view(-memory), memory.double()):
        batch = lmdecode.Decoding(CONFIG, WEIGHTS).batch(
            max_requests=1, num_beams=2, capacity=9, source=5
        )
        batch.add(request, given)
        results.append(batch.run()[0])
    for result in results[1:]:
        assert result.sequences.equal(results[0].sequences)
        assert result.log_probs.equal(results[0].log_probs)


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
                encoder_outputs=memory, attention_mask=inputs["attention_mask"],
                num_beams=num_beams, max_new_tokens=5, bad_words_ids=bad_words_ids,
            )  # fmt: skip
