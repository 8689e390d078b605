"""Packed models of every type compute what the model computes, whatever they read of layers."""

import copy
from pathlib import Path
from typing import Any

import packable_models
import pytest
import torch
import torch.nn.functional as F
from packable_models import logits
from torch import nn

from lmdecode import PackedLinear
from lmdecode.integrations.transformers import LmdecodeConfig, PackedLinearModule, pack_linears_
from lmdecode.integrations.transformers.linear import packing
from tests.support.releases import BEFORE_5_15, BEFORE_5_23

# Types of which no tiny model is built here, and why.
NOT_BUILT = {
    "blt": "no part of its config is small by its sizes",
    "cohere_compass_text": "rotary settings by kind of layer",
    "dbrx": "its config lacks rope_theta in transformers 5.23",
    "dots3_note": "sizes by layer", "dots3_note_text": "sizes by layer",
    "gemma3n": "needs timm", "gemma4": "images and sounds beside its text part, which is here",
    "gemma4_assistant": "drafts for another model",
    "gemma4_unified_assistant": "drafts for another model",
    "musicgen": "three models in one", "musicgen_melody": "three models in one",
    "nemo_speechlm": "reads sounds alone", "qwen4_exp": "tables of n-grams",
    "qwen4_exp_text": "tables of n-grams", "t5gemma2": "an encoder of images",
    "vibevoice_asr": "reads sounds alone", "voxtral_realtime": "reads sounds alone",
    "encoder-decoder": "is made of two others",
    "xlstm": "its state has another shape than its config says",
    "zamba2": "its shared layers have fixed places",
}  # fmt: skip
# Of those that read weights what stays as it is, by the ends of names.
READ = {
    "falcon_mamba": {"mixer.dt_proj"},
    # Before transformers 5.15 kernels alone read weights of Mamba.
    "jamba": set() if BEFORE_5_15 else {"mamba.dt_proj"},
    "longcat_flash": {"router.classifier"},
    "mamba": {"mixer.dt_proj"},
    "reformer": {"self_attention.query_key", "self_attention.value"},
    "rwkv": {"attention.output", "feed_forward.value"},
}
# One of each way of being read, and of each kind of model; all others are slow tests.
SAMPLE = [*READ, "bloom", "gpt2", "llama", "mamba2", "t5", "bart"]
BUILT = [kind for kind in packable_models.TYPES if kind not in NOT_BUILT]
ALL = [pytest.param(k, marks=() if k in SAMPLE else pytest.mark.slow) for k in BUILT]
OUTPUTS = 16


def unpacked(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if packing.is_linear(module)}


def test_most_types_are_built() -> None:
    assert len(BUILT) > (150 if BEFORE_5_23 else 190)  # earlier releases have fewer types
    assert BEFORE_5_23 or NOT_BUILT.keys() <= set(packable_models.TYPES)


@pytest.mark.parametrize("kind", ALL)
def test_a_packed_model_of_any_type_is_the_model(kind: str) -> None:
    """In float32, where what differs is no rounding of weights (transformers 5.23)."""
    model = packable_models.build(kind)
    want = logits(model)
    pack_linears_(model, "float32")
    assert (logits(model) - want).norm() <= 1e-5 * want.norm() and want.norm() > 0
    assert {".".join(name.split(".")[-2:]) for name in unpacked(model)} == READ.get(kind, set())


@pytest.mark.parametrize("kind", ["mamba", "jamba", "longcat_flash"])
def test_a_model_that_reads_weights_is_the_model_in_int8_and_when_loaded(
    kind: str, tmp_path: Path
) -> None:
    model = packable_models.build(kind)
    model.save_pretrained(tmp_path)
    want = logits(model)
    loaded = type(model).from_pretrained(tmp_path, quantization_config=LmdecodeConfig("int8"))
    pack_linears_(model, "int8")
    assert (logits(model) - want).norm() <= 0.05 * want.norm()
    assert unpacked(loaded) == unpacked(model)
    assert torch.equal(logits(loaded.eval()), logits(model))


class Reader(nn.Module):
    """Reads the weight of ``left`` in ``read``, and calls ``called``; both are [16, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.called = nn.Linear(16, OUTPUTS), nn.Linear(16, OUTPUTS)
        self.layers = nn.ModuleList([nn.Linear(16, OUTPUTS)])
        self.is_slow = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(x) + self.called(x).to(self.called.weight.dtype)

    def read(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class ByLinear(Reader):
    def read(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.left.weight)


class ByTransposed(Reader):
    def read(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.left.weight.T
        return x @ weight


class ByJoined(Reader):
    def read(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.cat([self.layers[0].weight, self.left.weight]).T[:, OUTPUTS:]


class OfAnother(Reader):
    def read(self, x: torch.Tensor) -> torch.Tensor:
        other = self
        return sum((x @ other.left.weight.mT for _ in range(2)), torch.zeros(()))


class ByTheWay(Reader):
    """Reads what tells nothing of numbers, and numbers where a condition is false."""

    def read(self, x: torch.Tensor) -> torch.Tensor:
        if (self.is_slow and x is not None) or self.training:
            return F.linear(x, self.left.weight)
        here = hasattr(self.left.weight, "SCB") or self.left.weight is None
        assert not here and isinstance(self.left.weight, torch.Tensor)
        return self.left(x.to(self.left.weight)).to(self.left.weight.device)


@pytest.mark.parametrize(
    ("kind", "left"),
    [
        (ByLinear, {"left"}),
        (ByTransposed, {"left"}),
        (ByJoined, {"left", "layers.0"}),
        (OfAnother, {"left"}),
        (ByTheWay, set()),
    ],
)
def test_layers_whose_weight_the_source_reads_stay(kind: type[Reader], left: set[str]) -> None:
    torch.manual_seed(0)
    model, x = nn.ModuleDict({"a": kind()}).eval(), torch.randn(3, 16)
    want = model["a"](x)
    pack_linears_(model, "float32")
    assert unpacked(model) == {f"a.{name}" for name in left}
    assert isinstance(model["a"].called, PackedLinearModule)
    assert torch.allclose(model["a"](x), want, atol=1e-5)


def test_a_condition_that_holds_is_one_behind_which_weights_are_read() -> None:
    model = ByTheWay()
    model.is_slow = True
    assert unpacked(pack_linears_(model)) == {"left"}


READS: dict[str, Any] = {
    "a product": lambda w: torch.randn(2, 16) @ w,
    "a batched product": lambda w: w @ torch.randn(2, 16, 3),
    "linear": lambda w: F.linear(torch.randn(2, 16), w),
    "T": lambda w: w.T,
    "joined": lambda w: torch.cat([w, torch.randn(2, 16)]),
    "an index": lambda w: w[0],
    "float": lambda w: w.bfloat16(),
    "data": lambda w: w.data.mul_(2),
    "in place": lambda w: w.div_(2),
    "a copy": copy.deepcopy,
    "a parameter": nn.Parameter,
    "a sum": torch.sum,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_any_other_read_of_a_packed_weight_is_refused(read: Any) -> None:
    """A product of meta tensors and others returned memory that nothing had written."""
    model = pack_linears_(nn.Sequential(nn.Sequential(nn.Linear(16, 16))))
    message = r"^PackedLinearModule: aten.* reads the weight of 0\.0, which is packed; expected"
    with torch.no_grad(), pytest.raises(RuntimeError, match=message):
        read(model[0][0].weight)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.slow
def test_reads_of_compiled_models() -> None:
    """Of a model whose source is found to read nothing, and one whose reads are not found."""
    model, x = pack_linears_(ByTheWay()), torch.randn(3, 16)
    with torch.no_grad():
        compiled = torch.compile(model.called, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), model.called(x))
        reads = torch.compile(lambda x: x @ model.called.weight.T, backend="aot_eager")
        with pytest.raises(Exception, match="two devices, cpu and meta"):
            reads(x)


def test_what_a_packed_weight_tells() -> None:
    model = pack_linears_(nn.Sequential(nn.Linear(16, 8).bfloat16()))
    weight = model[0].weight
    assert (weight.shape, weight.dtype, weight.device) == (
        (8, 16),
        torch.bfloat16,
        torch.device("cpu"),
    )
    assert weight.is_meta and weight.ndim == 2 and weight.numel() == 128 and len(weight) == 8
    assert "packed weight, [8, 16]" in repr(weight) and not weight.requires_grad
    x = torch.zeros(2).to(weight)
    assert (x.dtype, x.device) == (torch.bfloat16, torch.device("cpu"))
    assert not list(model.parameters()) and model[0].bias.dtype == torch.bfloat16


def test_a_bias_that_is_set_is_added_and_a_weight_is_refused() -> None:
    module = PackedLinearModule(PackedLinear(torch.eye(4), torch.ones(4)))
    x = torch.zeros(1, 4)
    for value in (torch.full((4,), 2.0), nn.Parameter(torch.full((4,), 3.0)), None):
        module.bias = value
        want = torch.zeros(1, 4) if value is None else value.detach()[None]
        assert torch.equal(module(x), want)
        assert (module.bias is None) == (value is None)
    for weight in (torch.eye(4), nn.Parameter(torch.eye(4))):
        with pytest.raises(ValueError, match="its weight is packed, and cannot be replaced"):
            module.weight = weight
