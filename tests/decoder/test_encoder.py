"""Encoders in C++ against those of transformers, of random weights."""

import copy
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lmdecode.integrations.transformers.decoding.encoding import ModelEncoder
from lmdecode.models.configs import EncoderConfig
from lmdecode.models.packed_stack import PackedEncoder
from lmdecode.models.record import read_record
from lmdecode.models.weights import EncoderWeights
from lmdecode.readers.transformers.encoder_decoder import encoder_of
from tests.support.op_contract import on_threads
from tests.support.records import with_entries
from tests.support.tiny_models import seeded_model

LENGTHS = (7, 30, 1, 12)
_SIZES: dict[str, Any] = {
    "vocab_size": 100, "d_model": 32, "encoder_layers": 2, "decoder_layers": 1,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 64, "max_position_embeddings": 64, "pad_token_id": 1,
}  # fmt: skip
_T5: dict[str, Any] = {
    "vocab_size": 100, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 3, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "marian": ("MarianMTModel", {
        **_SIZES, "activation_function": "swish", "scale_embedding": True,
        "decoder_start_token_id": 1,
    }),
    "bart": ("BartForConditionalGeneration", _SIZES),
    "mbart": ("MBartForConditionalGeneration", {**_SIZES, "scale_embedding": True}),
    "pegasus": ("PegasusForConditionalGeneration", _SIZES),
    "m2m_100": ("M2M100ForConditionalGeneration", {**_SIZES, "activation_function": "gelu_new"}),
    "t5": ("T5ForConditionalGeneration", _T5),
    "t5, gated": ("T5ForConditionalGeneration", {**_T5, "feed_forward_proj": "gated-gelu"}),
    "mt5": ("MT5ForConditionalGeneration", _T5),
    "umt5": ("UMT5ForConditionalGeneration", _T5),
}  # fmt: skip


@cache
def model_of(name: str) -> Any:
    kind, sizes = MODELS[name]
    model = seeded_model(kind, **sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases
                parameter.add_(torch.randn_like(parameter) / 10)
    return model


@cache
def packed(name: str, weight_format: str = "float32") -> PackedEncoder:
    return PackedEncoder(*encoder_of(model_of(name)), weight_format)


def rows_of(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return where each begins, and the places in each."""
    begins = torch.tensor((0, *lengths)).cumsum(0)
    return begins, torch.cat([torch.arange(length) for length in lengths])


def tokens_of(lengths: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randint(2, 98, (sum(lengths),), generator=torch.Generator().manual_seed(seed))


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


@torch.no_grad()
def by_transformers(name: str, tokens: Tensor, lengths: tuple[int, ...]) -> Tensor:
    model = model_of(name)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.full(mask.shape, model.config.pad_token_id)
    ids[mask] = tokens
    states: Tensor = model.get_encoder()(input_ids=ids, attention_mask=mask.long())[0]
    return states[mask]


@pytest.mark.parametrize("name", MODELS)
def test_the_states_of_transformers(name: str) -> None:
    tokens = tokens_of(LENGTHS)
    got = packed(name).forward(*rows_of(LENGTHS), tokens=tokens)
    assert relative(got, by_transformers(name, tokens, LENGTHS)) < 1e-5


def whisper() -> Any:
    sizes = {k: v for k, v in _SIZES.items() if k != "max_position_embeddings"} | {
        "pad_token_id": 0, "num_mel_bins": 8, "max_source_positions": 20, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_start_token_id": 3,
    }  # fmt: skip
    return seeded_model("WhisperForConditionalGeneration", **sizes)


@pytest.mark.parametrize("weight_format", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", ["marian", "t5, gated"])
def test_a_sequence_depends_on_nothing_else(name: str, weight_format: str) -> None:
    """More rows than are computed together, alone and on other numbers of threads: one result."""
    encoder, lengths = packed(name, weight_format), (*LENGTHS, *[33] * 40)
    begins, positions = rows_of(lengths)
    tokens = tokens_of(lengths, 1)
    whole = on_threads(lambda: encoder.forward(begins, positions, tokens=tokens), (2, 3))
    for i in (0, 1, 2, 3, 20, 43):
        rows = slice(int(begins[i]), int(begins[i + 1]))
        alone = encoder.forward(*rows_of((lengths[i],)), tokens=tokens[rows])
        assert alone.equal(whole[rows])
    near = {"float32": 1e-5, "bfloat16": 0.03, "int8": 0.06, "int4": 0.5}[weight_format]
    assert relative(whole, by_transformers(name, tokens, lengths)) < near


def test_positions_of_the_callers() -> None:
    """As for a batch that is padded on the left."""
    encoder, tokens = packed("bart"), tokens_of((5,))
    here = encoder.forward(torch.tensor([0, 5]), torch.arange(5) + 3, tokens=tokens)
    ids = torch.cat([torch.full((3,), 1), tokens])[None]
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    with torch.no_grad():
        want = model_of("bart").get_encoder()(input_ids=ids, attention_mask=mask)[0][0, 3:]
    assert relative(here, want) < 1e-5


def test_no_sequences_and_empty_ones() -> None:
    encoder, nothing = packed("t5"), torch.empty(0, dtype=torch.int64)
    assert encoder.forward(torch.tensor([0]), nothing, tokens=nothing).shape == (0, 32)
    tokens = tokens_of((4, 0, 3))
    got = encoder.forward(*rows_of((4, 0, 3)), tokens=tokens)
    assert got.equal(encoder.forward(*rows_of((4, 3)), tokens=tokens))


def encoder_arguments(name: str = "bart") -> list[Any]:
    begins, positions = rows_of(LENGTHS)
    return [*packed(name).of_model, tokens_of(LENGTHS), None, positions, begins]


EMBEDDING, WEIGHTS, TOKENS, INPUTS, POSITIONS, BEGINS = range(6)


def _with(name: str, value: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda memory: with_entries(memory, {name: value})


def _with_distances(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(memory: torch.Tensor) -> torch.Tensor:
        record = read_record(memory)
        place = [record["weights.relative_bias"][0], 4 * record["relative_bias_rows"] * count]
        return with_entries(memory, {"weights.relative_bias": place})

    return change


@pytest.mark.parametrize(
    ("name", "place", "change", "message"),
    [
        ("bart", TOKENS, lambda t: None, "tokens and inputs are both missing; expected one"),
        ("bart", INPUTS, lambda i: torch.zeros(50, 32), "tokens and inputs are both given"),
        ("bart", BEGINS, lambda b: b[[0, 2, 1, 3, 4]], r"row_begins\[1\] is -30 before the next"),
        ("bart", BEGINS, lambda b: b[:0], "row_begins has 0 entries; expected 0 to 50"),
        ("bart", WEIGHTS, lambda w: w[:64], "weights has 64 bytes; expected .*, as its record"),
        ("bart", WEIGHTS, _with("config.num_layers", 3), r"layers\.2\.qkv is absent; expected it"),
        ("bart", WEIGHTS, _with("config.num_layers", 1), r"a record with weights\.layers\.1\."),
        ("bart", WEIGHTS, _with("kind", "decoder"), 'of kind "decoder"; expected "encoder"'),
        ("bart", WEIGHTS, _with("config.memory_size", 32), "a record with config.memory_size; exp"),
        ("t5", WEIGHTS, _with_distances(4), "has 4 distances; expected an odd number"),
        ("t5", WEIGHTS, _with_distances(9), r"expected 0 to"),
    ],
)
def test_bad_input(name: str, place: int, change: Callable[[Any], Any], message: str) -> None:
    arguments = encoder_arguments(name)
    arguments[place] = change(arguments[place])
    with pytest.raises(ValueError, match=rf"^encoder_forward: .*{message}"):
        torch.ops.lmdecode.encoder_forward(*arguments)


def test_weights_of_other_shapes() -> None:
    config, weights = encoder_of(model_of("bart"))
    layer = weights.layers[0]
    wrong = weights._replace(layers=(layer._replace(ffn_up=layer.ffn_down), weights.layers[1]))
    with pytest.raises(ValueError, match=r"ffn_up has shape \[32, 48\]; expected \[48, 32\]"):
        PackedEncoder(config, wrong)
    with pytest.raises(ValueError, match="EncoderConfig: num_layers is 0; expected 1 to 2"):
        EncoderConfig(0, 32, 4, 8, 48, 100)
    assert isinstance(weights, EncoderWeights)


MASKS = {
    "none": None,
    "right": [[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]],
    "left": [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]],
    "both": [[0, 1, 1, 1, 1, 0], [0, 0, 0, 1, 0, 0]],
    "holes": [[1, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1]],  # the model's own encoder
}


@torch.no_grad()
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["bart", "m2m_100", "umt5"])
def test_masks(name: str, mask: str) -> None:
    model, ids = model_of(name), tokens_of((12,)).view(2, 6)
    given = None if MASKS[mask] is None else torch.tensor(MASKS[mask])
    seen = torch.ones(2, 6, dtype=torch.bool) if given is None else given.bool()
    ids[~seen] = model.config.pad_token_id
    want = model.get_encoder()(input_ids=ids, attention_mask=given)[0]
    got = ModelEncoder(model, "float32")(ids, given)
    assert got.last_hidden_state.shape == want.shape
    assert relative(got[0][seen], want[seen]) < 1e-5
    assert mask == "holes" or not got[0][~seen].any()


@torch.no_grad()
def test_what_the_models_own_encoder_does() -> None:
    model, ids = model_of("bart"), tokens_of((12,)).view(2, 6)
    own, encoder = model.get_encoder(), ModelEncoder(model, "int4")
    got = encoder(ids, output_hidden_states=True)
    assert len(got.hidden_states) == 3
    assert got[0].equal(own(ids)[0]) and not encoder(ids)[0].equal(own(ids)[0])
    embeddings = own.embed_tokens(ids)
    assert encoder(inputs_embeds=embeddings)[0].equal(own(inputs_embeds=embeddings)[0])


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_features(dtype: str) -> None:
    model = whisper()
    features = torch.randn(2, 8, 40)
    own = model.get_encoder()
    got = ModelEncoder(model, dtype)(input_features=features)[0]
    assert relative(got, own(features)[0]) < (1e-5 if dtype == "float32" else 0.06)
    with pytest.raises(ValueError, match="mel input features to be of length 40"):
        ModelEncoder(model, dtype)(input_features=features[..., :20])


def test_a_copy_is_as_large_as_the_encoder() -> None:
    encoder, tokens = packed("marian", "int8"), tokens_of(LENGTHS)
    weights = sum(tensor.nbytes for tensor in encoder.of_model)
    written = pickle.dumps(encoder)
    assert len(written) < 1.5 * weights + 20_000
    for copied in (pickle.loads(written), copy.deepcopy(encoder)):
        got = copied.forward(*rows_of(LENGTHS), tokens=tokens)
        assert got.equal(encoder.forward(*rows_of(LENGTHS), tokens=tokens))
