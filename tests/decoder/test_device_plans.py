"""What searches on a device keep for the next ones of their shape: results are as without it."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lmdecode
from lmdecode.decoder import device_loop
from lmdecode.decoder.device_loop import DeviceDecoder
from tests.decoder.decoder_models import make_inputs, make_model
from tests.support import decoder_step_on_cpu

pytest.importorskip("transformers")
from lmdecode.readers.transformers.encoder_decoder import decoder_of

decoder_step_on_cpu.register()


class Replayed:
    """Stands for a CUDA graph: does what was captured, on the memory that it was captured with."""

    captures = 0

    def __init__(self, plan: Any) -> None:
        type(self).captures += 1
        self._plan, self._places = plan, self._now(plan)

    @staticmethod
    def _now(plan: Any) -> list[int]:
        found = [*plan.state, *plan._parameters, *plan._rules, plan._searches, plan._nodes]
        found += [t for t in vars(plan.forward).values() if isinstance(t, torch.Tensor)]
        return [tensor.data_ptr() for tensor in found]

    def replay(self) -> None:
        assert self._now(self._plan) == self._places
        self._plan._step()


@pytest.fixture
def decodings(monkeypatch: pytest.MonkeyPatch) -> tuple[lmdecode.Decoding, lmdecode.Decoding]:
    """Return the decoding in C++, and that by the loop of devices, which captures its steps."""
    Replayed.captures = 0
    monkeypatch.setattr(device_loop.Plan, "_captured", lambda plan: Replayed(plan))
    model = make_model("marian")
    expected = lmdecode.Decoding.from_pretrained(model)
    got = lmdecode.Decoding.from_pretrained(model)
    got.decoder = DeviceDecoder(*decoder_of(model), device=torch.device("cpu"), use_cuda_graph=True)
    return expected, got


class Launches(TorchDispatchMode):
    """Counts the calls that are not views of a tensor: on a GPU each is a kernel or more."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(result.alias_info is not None for result in func._schema.returns)
        writes = func._schema.is_mutable
        if (writes or not is_view) and not func.name().startswith("aten::empty"):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def inputs_of(seed: int) -> dict[str, Any]:
    inputs = make_inputs("marian")
    generator = torch.Generator().manual_seed(seed)
    ids = inputs["input_ids"]
    inputs["input_ids"] = torch.randint(5, 35, ids.shape, generator=generator)
    return inputs


def check(decodings: Any, seed: int, **arguments: Any) -> None:
    expected, got = decodings
    arguments = {"max_new_tokens": 12, "num_beams": 3, **arguments}
    one = expected.generate(**inputs_of(seed), **arguments)
    assert torch.equal(got.generate(**inputs_of(seed), **arguments), one)


def test_a_shape_is_captured_once(decodings) -> None:
    for seed in range(5):
        check(decodings, seed)
    assert Replayed.captures == 1
    for seed in range(3):
        check(decodings, seed, num_beams=1, do_sample=False)
        check(decodings, seed, num_beams=4, num_beam_groups=2, diversity_penalty=0.5)
    # Of three shapes two are kept.
    assert Replayed.captures <= 1 + 2 * 3


def test_a_step_is_few_launches(decodings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve a layer, and seven for embedding, logits, the choice and the table of beams."""
    counted: list[list[str]] = []
    step = device_loop.Plan._step

    def watch(plan: Any) -> None:
        with Launches() as launches:
            step(plan)
        counted.append(launches.names)

    monkeypatch.setattr(device_loop.Plan, "_step", watch)
    check(decodings, 0)
    layers = len(decodings[1].decoder.weights.layers)
    for names in counted:
        assert len(names) <= 12 * layers + 7, names
    counted.clear()
    check(decodings, 0, num_beams=4, num_beam_groups=2, diversity_penalty=0.5)
    assert counted and len(counted[0]) <= 12 * layers + 7


def test_rules_may_have_other_values_but_not_other_switches(decodings) -> None:
    for penalty in (1.2, 1.9, 1.0001):
        check(decodings, 3, repetition_penalty=penalty)
    assert Replayed.captures == 1
    check(decodings, 3)
    check(decodings, 3, no_repeat_ngram_size=2)
    check(decodings, 3, no_repeat_ngram_size=3)
    assert Replayed.captures == 3
    for token in (7, 9):
        check(decodings, 3, suppress_tokens=[token], no_repeat_ngram_size=3)
    assert Replayed.captures == 4
    for length in (2, 5):
        check(decodings, 3, min_new_tokens=length, forced_eos_token_id=2)
    assert Replayed.captures == 5


def test_ends_and_lengths_may_be_others(decodings) -> None:
    for seed, penalty, early in ((1, 0.5, True), (2, 2.0, False), (1, 1.0, "never")):
        check(decodings, seed, length_penalty=penalty, early_stopping=early)
    assert Replayed.captures == 1
    check(decodings, 1, max_new_tokens=7)
    assert Replayed.captures == 2


def test_nothing_is_left_of_a_search_with_nan(decodings) -> None:
    expected, got = decodings
    check(decodings, 1)
    inputs = inputs_of(2)
    encoder = make_model("marian").get_encoder()
    memory = encoder(**inputs)
    memory.last_hidden_state[:] = torch.nan
    with pytest.raises(RuntimeError, match="prompt 0"):
        got.generate(
            encoder_outputs=memory, attention_mask=inputs["attention_mask"], num_beams=3,
            max_new_tokens=12,
        )  # fmt: skip
    check(decodings, 3)
    assert expected is not got


def test_searches_of_several_threads_have_their_own(decodings) -> None:
    expected, got = decodings
    arguments = {"max_new_tokens": 12, "num_beams": 3}
    wanted = [expected.generate(**inputs_of(seed), **arguments) for seed in range(8)]
    with ThreadPoolExecutor(4) as threads:
        found = list(
            threads.map(lambda seed: got.generate(**inputs_of(seed), **arguments), range(8))
        )
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert len(got.decoder.plans) <= 2


def test_in_and_out_of_inference_mode(decodings) -> None:
    for is_inference in (True, False, True):
        with torch.inference_mode() if is_inference else nullcontext():
            check(decodings, 4)
    assert Replayed.captures == 1


def test_without_graphs_and_on_the_cpu_nothing_is_captured() -> None:
    model = make_model("marian")
    for use_cuda_graph in (True, False):
        decoder = DeviceDecoder(
            *decoder_of(model), device=torch.device("cpu"), use_cuda_graph=use_cuda_graph
        )
        got = lmdecode.Decoding.from_pretrained(model)
        got.decoder = decoder
        got.generate(**inputs_of(1), max_new_tokens=4)
        assert [plan._graph for _, plan in decoder.plans._kept] == [None]
