"""``LmdecodeConfig``: models that are packed while they load."""

import copy
import gc
from pathlib import Path
from typing import Any

import packable_models
import pytest
import torch
import torch.nn.functional as F
import transformers
from packable_models import logits as logits_of
from test_pack_linears import MODELS, is_counted, llama, logits, packed
from torch import nn
from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

from lmdecode import PackedLinear
from lmdecode.integrations.transformers import (
    LmdecodeConfig,
    PackedLinearModule,
    pack_linears_,
    packed_from_awq,
    packed_from_gptq,
)
from lmdecode.integrations.transformers.linear import packing
from tests.support.op_contract import WrongCall, assert_refused, wrong_calls
from tests.support.releases import BEFORE_5_15, BEFORE_5_23


def load(model: nn.Module, folder: Path, config: LmdecodeConfig | None, **more: Any) -> nn.Module:
    if not (folder / "config.json").exists():
        model.save_pretrained(folder)
    return type(model).from_pretrained(folder, quantization_config=config, **more).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_loading_and_packing_are_one(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = MODELS[name]()
    for settings in (
        {"dtype": "int8"},
        {"dtype": "int8", "rotate": False},
        {"dtype": "int4", "group_size": 128},
    ):
        got = load(model, tmp_path, LmdecodeConfig(**settings), dtype=dtype)
        want = pack_linears_(load(model, tmp_path, None, dtype=dtype), **settings)
        assert list(packed(got)) == list(packed(want))
        assert torch.equal(logits(got), logits(want)) and logits(got).dtype == dtype
        assert got.get_memory_footprint() == want.get_memory_footprint() and is_counted(got)
        assert not any(parameter.requires_grad for parameter in got.parameters())
        assert got.is_quantized and got.config.quantization_config.dtype == settings["dtype"]


def test_auto_class_and_heads_of_their_own(tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    got = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=LmdecodeConfig("float32", skip=["layers.0"])
    )
    assert (logits(got) - logits(model)).abs().max() < 1e-5
    left = [n for n, m in got.named_modules() if isinstance(m, nn.Linear)]
    assert len(left) == 7 and all(name.startswith("model.layers.0.") for name in left)


def test_a_name_to_skip_that_no_module_has(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^LmdecodeConfig: skip has 'lm_heed', which is in the"):
        load(llama(), tmp_path, LmdecodeConfig("int8", skip=["lm_heed"]))


@pytest.mark.slow
def test_weights_are_packed_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few of the weights of the layers are there at once, whatever the number of layers."""
    model = llama(tie_word_embeddings=False, num_hidden_layers=6)
    sizes = {tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Linear)}
    model.save_pretrained(tmp_path)
    del model
    gc.collect()
    counts: list[int] = []

    def weights() -> dict[int, torch.Tensor]:
        return {
            found.data_ptr(): found
            for found in gc.get_objects()
            if type(found) in (torch.Tensor, nn.Parameter)
            and found.device.type == "cpu"
            and found.is_floating_point()
            and tuple(found.shape) in sizes
        }

    others = weights()  # of models that other tests keep

    def counted(*arguments: Any, **keywords: Any) -> PackedLinear:
        counts.append(len(weights().keys() - others.keys()))
        return PackedLinear(*arguments, **keywords)

    monkeypatch.setattr(packing, "PackedLinear", counted)
    gc.collect()
    got = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=LmdecodeConfig()
    )
    assert len(counts) == len(packed(got)) == 6 * 7 + 1
    assert max(counts) <= 3  # of 43: the embedding, which has the shape of the head, and this one


def test_a_weight_that_is_missing(tmp_path: Path) -> None:
    """It gets the numbers that transformers gives it, packed."""
    model = llama()
    model.save_pretrained(tmp_path)
    got = transformers.LlamaForSequenceClassification.from_pretrained(
        tmp_path, quantization_config=LmdecodeConfig("float32"), num_labels=3
    )
    assert isinstance(got.score, PackedLinearModule) and len(packed(got)) == 15
    assert got(torch.tensor([[5, 6]])).logits.isfinite().all()


def test_what_is_refused(tmp_path: Path) -> None:
    model = llama()
    with pytest.raises(ValueError, match="dtype is 'int3'; expected one of"):
        LmdecodeConfig("int3")
    with pytest.raises(TypeError, match="LmdecodeConfig: skip is of type str"):
        LmdecodeConfig(skip="lm_head")
    with pytest.raises(ValueError, match="quant_method is 'awq'"):
        LmdecodeConfig(quant_method="awq")
    quantizer = AutoHfQuantizer.from_config(LmdecodeConfig())
    for devices in ("cuda", {"": "cpu", "lm_head": torch.device("cuda:0")}, {"": 0}):
        with pytest.raises(ValueError, match=r"device_map asks for .*; packed weights run on"):
            quantizer.validate_environment(device_map=devices)
    quantizer.validate_environment(device_map={"": "cpu", "lm_head": torch.device("cpu")})
    got = load(model, tmp_path, LmdecodeConfig())
    with pytest.raises(ValueError, match="not serializable"):
        got.save_pretrained(tmp_path / "saved")


def test_the_config_is_one_of_transformers() -> None:
    config = LmdecodeConfig("int4", skip=("lm_head",), group_size=64)
    assert config.to_dict() == {
        "quant_method": "lmdecode", "dtype": "int4", "skip": ["lm_head"], "group_size": 64,
    }  # fmt: skip
    again = AutoQuantizationConfig.from_dict(config.to_dict())
    assert isinstance(again, LmdecodeConfig) and again.to_dict() == config.to_dict()


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
    want = logits_of(model)
    pack_linears_(model, "float32")
    assert (logits_of(model) - want).norm() <= 1e-5 * want.norm() and want.norm() > 0
    assert {".".join(name.split(".")[-2:]) for name in unpacked(model)} == READ.get(kind, set())


@pytest.mark.parametrize("kind", ["mamba", "jamba", "longcat_flash"])
def test_a_model_that_reads_weights_is_the_model_in_int8_and_when_loaded(
    kind: str, tmp_path: Path
) -> None:
    model = packable_models.build(kind)
    model.save_pretrained(tmp_path)
    want = logits_of(model)
    loaded = type(model).from_pretrained(tmp_path, quantization_config=LmdecodeConfig("int8"))
    pack_linears_(model, "int8")
    assert (logits_of(model) - want).norm() <= 0.05 * want.norm()
    assert unpacked(loaded) == unpacked(model)
    assert torch.equal(logits_of(loaded.eval()), logits_of(model))


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


INPUTS, FEATURES = 256, 72


def words_of(values: torch.Tensor) -> torch.Tensor:
    """int32 [..., n / 8] of numbers below 16 [..., n]: the first in the lowest four bits."""
    parts = values.long().unflatten(-1, (-1, 8))
    words = sum(parts[..., i] << 4 * i for i in range(8))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def zero_words(zeros: torch.Tensor, offset: int) -> torch.Tensor:
    """int32 [groups, out / 8] of zeros [groups, out]: of "gptq" (offset 1) or "gptq_v2" (0)."""
    return (words_of(zeros).long() - offset * 0x11111111).int()


def random_layer(group: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [in, out], scales and zeros [groups, out]."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(16, (INPUTS, FEATURES), generator=generator)
    scales = torch.rand(INPUTS // group, FEATURES, generator=generator).half() / 64
    return q, scales, torch.randint(16, scales.shape, generator=generator)


def same(layer: PackedLinear, weight: torch.Tensor) -> None:
    x = torch.eye(len(weight)) * 127
    want = (127 * weight.double()).float()
    assert torch.equal(layer(x), want if layer.bias is None else want + layer.bias)


def awq_columns(columns: torch.Tensor) -> torch.Tensor:
    """Of each eight columns, the order in which AWQ puts them into a word."""
    return columns.unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(-2)


@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_awq(group: int) -> None:
    q, scales, zeros = random_layer(group)
    bias = torch.randn(FEATURES)
    layer = packed_from_awq(words_of(awq_columns(q)), words_of(awq_columns(zeros)), scales, bias)
    times = INPUTS // scales.shape[0]
    weight = (q - zeros.repeat_interleave(times, 0)) * scales.float().repeat_interleave(times, 0)
    same(layer, weight)
    assert layer.dtype == "int4" and layer.group_size == min(group, 128)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("order", ["none", "neighbours", "mixed"])
@pytest.mark.parametrize("group", [32, 128])
def test_gptq(group: int, order: str, offset: int) -> None:
    q, scales, zeros = random_layer(group, seed=1)
    g_idx = torch.arange(INPUTS) // group
    if order == "mixed":
        g_idx = g_idx[torch.randperm(INPUTS, generator=torch.Generator().manual_seed(2))]
    layer = packed_from_gptq(
        words_of(q.T).T, zero_words(zeros, offset), scales.float(),
        None if order == "none" else g_idx.int(), zero_offset=offset,
    )  # fmt: skip
    same(layer, (q - zeros[g_idx]) * scales.float()[g_idx])
    assert (layer.input_order is not None) == (order == "mixed")


def test_words_are_those_of_the_formats() -> None:
    """The helpers of this file, on numbers written by hand."""
    assert words_of(torch.arange(8))[0].item() == 0x76543210
    assert words_of(torch.full((8,), 15))[0].item() == -1
    assert words_of(awq_columns(torch.arange(8)))[0].item() == 0x75316420
    zeros = torch.tensor([[0, 0, 8, 15, 1, 0, 7, 3], [8] * 8, [0] * 8])
    assert zero_words(zeros, 0)[:2].flatten().tolist() == [0x3701F800, 0x88888888 - (1 << 32)]
    # The first 0 borrows from the second, which borrows from 8; the one after 1 borrows from 7.
    assert zero_words(zeros, 1).flatten().tolist() == [0x25F0E6EF, 0x77777777, -0x11111111]


Q, S, Z = random_layer(64)
GPTQ = (words_of(Q.T).T, words_of(Z), S)
AWQ = (words_of(awq_columns(Q)), words_of(awq_columns(Z)), S)
WRONG = [
    ("packed_from_awq: qweight is of type list", lambda: packed_from_awq([1], *AWQ[1:])),
    ("qweight has dtype int64; expected int32", lambda: packed_from_awq(AWQ[0].long(), *AWQ[1:])),
    (r"qzeros is of \[4, 64\] groups and outputs; expected \[4, 72\]",
     lambda: packed_from_awq(AWQ[0], AWQ[1][:, :8], S)),
    (r"scales holds numbers that float16 does not hold, 0\.\d+ the first of them; expected",
     lambda: packed_from_awq(*AWQ[:2], S.float() + 1e-9)),
    (r"scales is of \[4, 71\]", lambda: packed_from_gptq(*GPTQ[:2], S[:, :71])),
    (r"scales has shape \[72\]; expected two", lambda: packed_from_gptq(*GPTQ[:2], S[0])),
    (r"g_idx is int64 \[3\]; expected int32 or int64 \[256\]",
     lambda: packed_from_gptq(*GPTQ, torch.arange(3))),
    (
        "does not have 64 inputs of each of 4 groups, but 256 of group 0; expected 64 of each from "
        "0 to 3",
        lambda: packed_from_gptq(*GPTQ, torch.zeros(256).int()),
    ),
    ("does not have 64 inputs of each of 4 groups, but 64 of group 4; expected",
     lambda: packed_from_gptq(*GPTQ, torch.arange(1, 5).repeat_interleave(64))),
    ("does not have 64 inputs of each of 4 groups, but 64 of group -1; expected",
     lambda: packed_from_gptq(*GPTQ, torch.arange(-1, 3).repeat_interleave(64))),
    ("zero_offset is 2; expected 0 or 1", lambda: packed_from_gptq(*GPTQ, zero_offset=2)),
]  # fmt: skip


@wrong_calls(WRONG)
def test_wrong_calls(wrong: WrongCall) -> None:
    assert_refused(wrong)
