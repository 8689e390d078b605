"""The loop of a device: the tokens of the loop in C++, and its ops as torch wants them."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import lmdecode
from lmdecode.decoder.device_loop import DeviceDecoder, Plan
from lmdecode.reference import decoder_step as reference
from tests.decoder.decoder_models import END, MODELS, make_inputs, make_model
from tests.support import decoder_step_on_cpu

pytest.importorskip("transformers")
from lmdecode.readers.transformers.encoder_decoder import decoder_of

ops = torch.ops.lmdecode
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
decoder_step_on_cpu.register()


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not (torch.cuda.is_available() and lmdecode.has_cuda()):
        pytest.skip("no CUDA device")
    return torch.device(request.param)


@functools.cache
def pair(kind: str, device: torch.device) -> tuple[lmdecode.Decoding, lmdecode.Decoding]:
    """Return the decoding in C++, and that by the loop of devices."""
    model = make_model(kind)
    expected = lmdecode.Decoding.from_pretrained(model)
    got = lmdecode.Decoding.from_pretrained(model)
    got.decoder = DeviceDecoder(*decoder_of(model), device=device)
    return expected, got


def check(kind: str, device: torch.device, **arguments: Any) -> None:
    expected, got = pair(kind, device)
    arguments = {"max_new_tokens": 14, "return_dict_in_generate": True, **arguments}
    with_scores = arguments.get("num_beams", 1) > 1 and kind != "whisper"
    if with_scores:
        arguments["output_scores"] = True
    inputs = make_inputs(kind)
    one, two = expected.generate(**inputs, **arguments), got.generate(**inputs, **arguments)
    if kind == "whisper":  # its generate() wraps the result in its own
        assert str(two["sequences"].tolist()) == str(one["sequences"].tolist())
        return
    assert two.sequences.tolist() == one.sequences.tolist()
    if with_scores:
        torch.testing.assert_close(two.sequences_scores, one.sequences_scores, atol=1e-4, rtol=1e-4)
        assert two.beam_indices.tolist() == one.beam_indices.tolist()


@pytest.mark.parametrize("num_beams", [1, 4, 5])
@pytest.mark.parametrize("kind", sorted(MODELS))
def test_tokens_are_those_of_the_loop_in_cpp(
    kind: str, num_beams: int, device: torch.device
) -> None:
    check(kind, device, num_beams=num_beams, max_new_tokens=24)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 1.0, 2.0])
def test_when_a_search_ends(
    early_stopping: bool | str, length_penalty: float, device: torch.device
) -> None:
    check(
        "marian",
        device,
        num_beams=4,
        num_return_sequences=4,
        early_stopping=early_stopping,
        length_penalty=length_penalty,
        max_new_tokens=20,
    )


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize(
    "arguments",
    [
        {"min_new_tokens": 6},
        {"no_repeat_ngram_size": 1},
        {"no_repeat_ngram_size": 2},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6, "no_repeat_ngram_size": 3},
        {"forced_bos_token_id": 9, "suppress_tokens": [10, 11]},
        {"forced_eos_token_id": END},
        {"begin_suppress_tokens": [4, 5, 6, 7]},
        {"bad_words_ids": [[14], [15]]},
        {"sequence_bias": {(16,): 3.0, (17,): -4.0}, "repetition_penalty": 1.2},
        {"eos_token_id": [2, 20, 21, 22], "min_new_tokens": 4, "no_repeat_ngram_size": 1},
    ],
    ids=lambda a: "+".join(a),
)
def test_processors(arguments: dict[str, Any], num_beams: int, device: torch.device) -> None:
    for kind in ("bart", "t5"):
        check(kind, device, num_beams=num_beams, **arguments)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_a_prompt_of_the_decoder(num_beams: int, device: torch.device) -> None:
    prompt = torch.randint(3, 60, (3, 4), generator=torch.Generator().manual_seed(5))
    for kind in ("marian", "t5"):
        check(kind, device, num_beams=num_beams, decoder_input_ids=prompt)


@pytest.mark.parametrize("num_beam_groups", [2, 4])
def test_groups(num_beam_groups: int, device: torch.device) -> None:
    for kind in ("marian", "t5"):
        check(
            kind,
            device,
            num_beams=4,
            num_beam_groups=num_beam_groups,
            diversity_penalty=0.7,
            num_return_sequences=4,
        )


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"num_beams": 4},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7},
        {"num_beams": 3, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 1, "forced_bos_token_id": 9, "min_new_tokens": 6},
        {"num_beams": 2, "bad_words_ids": [[14]], "forced_eos_token_id": END},
    ],
    ids=lambda a: "+".join(a) or "greedy",
)
def test_a_graph_gives_the_same_tokens(
    arguments: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that was without one gets one, and keeps it for other texts."""
    if device.type == "cpu":
        # What stands in for a CUDA graph replays a step by doing it.
        monkeypatch.setattr(Plan, "_captured", lambda plan: SimpleNamespace(replay=plan._step))
    for kind in ("marian", "t5"):
        expected, _ = pair(kind, device)
        decoder = DeviceDecoder(*decoder_of(make_model(kind)), device=device)
        got = lmdecode.Decoding.from_pretrained(make_model(kind))
        got.decoder = decoder
        inputs = make_inputs(kind)
        graphs = []
        for use_cuda_graph in (False, True, True):
            decoder.use_cuda_graph = use_cuda_graph
            one, two = (
                decoding.generate(**inputs, **arguments, max_new_tokens=20)
                for decoding in (expected, got)
            )
            assert two.tolist() == one.tolist()
            ((_, plan),) = decoder.plans._kept
            graphs.append(plan._graph)
            inputs = {name: tensor.flip(0) for name, tensor in inputs.items()}
        assert graphs[0] is None
        assert graphs[1] is graphs[2] is not None


def test_a_sequence_as_long_as_the_relative_bias_allows(device: torch.device) -> None:
    """A token more than it has distances: the last one is not read."""
    model = make_model("t5")
    config, weights = decoder_of(model)
    assert weights.relative_bias is not None
    weights = weights._replace(relative_bias=weights.relative_bias[:, :12])
    one, two = lmdecode.Decoding.from_pretrained(model), lmdecode.Decoding.from_pretrained(model)
    one.decoder = lmdecode.Decoding(config, weights).decoder
    two.decoder = DeviceDecoder(config, weights, device=device)
    arguments = {**make_inputs("t5"), "num_beams": 3, "eos_token_id": None, "max_length": 13}
    expected, got = one.generate(**arguments), two.generate(**arguments)
    assert expected.shape[1] == 13
    assert got.tolist() == expected.tolist()
    for decoding in (one, two):
        with pytest.raises(ValueError, match="at most 13"):
            decoding.generate(**{**arguments, "max_length": 14})


def test_nan_is_an_error_of_its_prompt(device: torch.device) -> None:
    _, decoding = pair("marian", device)
    inputs = make_inputs("marian")
    memory = decoding.model.get_encoder()(**inputs)
    memory.last_hidden_state[1, 0] = torch.nan
    for num_beams in (1, 3):
        with pytest.raises(RuntimeError, match="prompt 1"):
            decoding.generate(
                encoder_outputs=memory,
                attention_mask=inputs["attention_mask"],
                num_beams=num_beams,
                max_new_tokens=5,
            )


def test_what_it_cannot_do_is_refused() -> None:
    model = make_model("marian")
    config, weights = decoder_of(model)
    with pytest.raises(ValueError, match="dtype is 'int8'; expected one of float32, float16"):
        DeviceDecoder(config, weights, "int8")
    with pytest.raises(ValueError, match="layers has 1 entries"):
        DeviceDecoder(config, weights._replace(layers=weights.layers[:1]))
    with pytest.raises(ValueError, match="logits has shape"):
        DeviceDecoder(config, weights._replace(logits=weights.logits[:-1]))
    with pytest.raises(ValueError, match="use_cuda_graph is True"):
        lmdecode.Decoding(config, weights, use_cuda_graph=True)
    _, decoding = pair("marian", torch.device("cpu"))
    with pytest.raises(ValueError, match="max_length: expected at most 97"):
        decoding.generate(**make_inputs("marian"), max_new_tokens=200)
    for num_beams, instead in ((1, "$"), (2, ", also with custom_generate=beam_search")):
        with pytest.raises(ValueError, match=rf"NoBadWords.*by model.generate\(\){instead}"):
            decoding.generate(**make_inputs("marian"), bad_words_ids=[[3, 4]], num_beams=num_beams)
    with pytest.raises(ValueError, match="stopping_criteria"):
        decoding.generate(**make_inputs("marian"), max_time=100.0)
    for name in ("output_logits", "output_scores"):
        with pytest.raises(ValueError, match=f"{name}: expected False on a device"):
            decoding.generate(**make_inputs("marian"), return_dict_in_generate=True, **{name: True})
    with pytest.raises(ValueError, match=r"Decoding\.batch"):
        decoding.batch(max_requests=1, num_beams=1, capacity=4, source=4)


Call = tuple[str, tuple[Any, ...], dict[str, Tensor]]


def calls(dtype: torch.dtype) -> list[Call]:
    """Return a call of each op, and more of those with choices."""
    generator = torch.Generator().manual_seed(3)

    def randn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    rows, heads, head, source, size = 6, 3, 10, 16, 22
    narrow = torch.float32
    found: list[Call] = []
    # Few positions, and so many that blocks share them.
    for capacity, at, from_source, lengths in (
        (7, [0, 3, 6, 2, 7, -1], source, [5, 0, 16]),
        (900, [0, 130, 899, 500, 900, -1], 1504, [1500, 70, 700]),
    ):
        table = torch.randint(0, rows, (rows, capacity), generator=generator, dtype=torch.int32)
        positions = torch.tensor(at, dtype=torch.int32)
        for row, position in enumerate(at):
            if 0 <= position < capacity:  # no row reads what another one writes in this step
                others = table[:, position]
                others[others == row] = -1
        for bias in (None, randn(heads, capacity + 2, dtype=narrow)):
            found.append(
                (
                    "decoder_self_attention_",
                    (randn(rows, 3, heads, head), randn(rows, heads, capacity, 16),
                     randn(rows, heads, capacity, 16), table, positions, bias, 0.3, 1e-6),
                    {"out": randn(rows, heads, head)},
                )
            )  # fmt: skip
        found.append(
            (
                "decoder_cross_attention",
                (randn(rows, heads, head), randn(3, heads, 16, from_source),
                 randn(3, heads, from_source, 16), torch.tensor(lengths), 0.3, 0.0),
                {"out": randn(rows, heads, head)},
            )
        )  # fmt: skip
    positions = torch.tensor([0, 3, 6, 2, 7, -1], dtype=torch.int32)
    cache = (randn(2, heads, 16, source), randn(2, heads, source, 16))
    found.append(("decoder_cross_cache_", (randn(2, 5, 2, heads, head), *cache), {}))
    gamma, beta = randn(size, dtype=narrow), randn(size, dtype=narrow)
    for delta, bias, norm, rms_norm, norm_first in (
        (randn(rows, size), randn(size, dtype=narrow), (gamma, beta), False, False),
        (randn(rows, size), None, (gamma, None), True, True),
        (None, None, (None, None), False, False),
    ):
        arguments = (
            randn(rows, size, dtype=narrow),
            delta,
            bias,
            *norm,
            1e-5,
            rms_norm,
            norm_first,
        )
        found.append(("decoder_add_norm_", arguments, {"out": randn(rows, size)}))
    tokens = torch.tensor([0, 5, 39, 2, 40, -1])
    for position_table in (None, randn(8, size, dtype=narrow)):
        found.append(
            (
                "decoder_embed",
                (tokens, positions, randn(40, size), position_table, 3.0, 2),
                {"x": randn(rows, size, dtype=narrow)},
            )
        )
    for activation in (1, 2, 3, 4):
        for gate in (None, randn(rows, size)):
            found.append(("decoder_activate_", (randn(rows, size), gate, activation), {}))
    return found


def moved(call: Call, to: Callable[[Tensor], Tensor]) -> Call:
    name, arguments, outputs = call
    moved_arguments = tuple(to(a) if isinstance(a, Tensor) else a for a in arguments)
    return name, moved_arguments, {key: to(tensor) for key, tensor in outputs.items()}


@pytest.mark.parametrize("number", range(len(calls(torch.float32))))
def test_ops_are_registered(number: int, device: torch.device) -> None:
    name, arguments, outputs = moved(calls(torch.float32)[number], lambda t: t.to(device))
    opcheck(getattr(ops, name).default, arguments, outputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ops_are_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for call in calls(dtype):
        _, expected_arguments, expected_outputs = moved(call, Tensor.clone)
        name, arguments, outputs = moved(call, lambda t: t.to(device, copy=True))
        getattr(reference, name)(*expected_arguments, **expected_outputs)
        assert getattr(ops, name)(*arguments, **outputs) is None
        for expected, got in zip(
            (*expected_arguments, *expected_outputs.values()),
            (*arguments, *outputs.values()),
            strict=True,
        ):
            if isinstance(expected, Tensor):
                torch.testing.assert_close(got.cpu(), expected, atol=tolerance, rtol=tolerance)


def test_the_reference_of_attention_is_softmax() -> None:
    """Against torch's own attention, where no table and no epsilon is in between."""
    torch.manual_seed(0)
    rows, heads, head, capacity = 4, 2, 16, 5
    keys, values = torch.randn(2, rows, heads, capacity, head)
    qkv, out = torch.randn(rows, 3, heads, head), torch.empty(rows, heads, head)
    own = torch.arange(rows, dtype=torch.int32)
    positions = torch.full((rows,), 3, dtype=torch.int32)
    reference.decoder_self_attention_(
        qkv, keys, values, own[:, None].repeat(1, capacity), positions, None, 0.25, 0.0, out=out
    )
    assert keys[:, :, 3].equal(qkv[:, 1])
    assert values[:, :, 3].equal(qkv[:, 2])
    expected = torch.nn.functional.scaled_dot_product_attention(
        qkv[:, 0, :, None], keys[:, :, :4], values[:, :, :4], scale=0.25
    )[:, :, 0]
    torch.testing.assert_close(out, expected)
