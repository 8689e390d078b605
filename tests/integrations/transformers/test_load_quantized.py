"""Folders of AWQ's and GPTQ's checkpoints, written in plain torch, and what is loaded from them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_pack_linears import IDS, gpt2, logits, packed
from test_pack_linears import llama as small_llama
from test_quantizer import awq_columns, same, words_of, zero_words
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AutoHfQuantizer

from lmdecode.integrations.transformers import PackedLinearModule, load_quantized, pack_linears_
from lmdecode.integrations.transformers.linear.packing import is_linear
from lmdecode.integrations.transformers.quantized_folder import _QuantizedConfig
from tests.support.releases import BEFORE_5_1
from tests.support.tiny_models import change_config

AWQ: dict[str, Any] = {
    "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
}  # fmt: skip
GPTQ: dict[str, Any] = {
    "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False,
    "checkpoint_format": "gptq",
}  # fmt: skip
V2 = {**GPTQ, "checkpoint_format": "gptq_v2"}
MIXED = {**GPTQ, "desc_act": True}  # inputs of a group lie anywhere
FORMATS = {
    "awq": AWQ,
    "awq, groups of 64": {**AWQ, "group_size": 64},
    "awq, groups of 128": {**AWQ, "group_size": 128, "version": "GEMM"},
    "awq, one group": {**AWQ, "group_size": -1},
    "gptq": GPTQ,
    "gptq, groups of 128": {**GPTQ, "group_size": 128},
    "gptq, one group": {**GPTQ, "group_size": -1},
    "gptq_v2": V2,
    "gptq, desc_act": MIXED,
    "gptq, the head too": {**GPTQ, "lm_head": True},
    "gptq, symmetric": {**GPTQ, "sym": True},
    "gptq_v2, symmetric": {**V2, "sym": True},
    "gptq, not told": {**GPTQ, "sym": None},
}


def llama(**settings: Any) -> nn.Module:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": False}
    return small_llama(**{**sizes, **settings})


@torch.no_grad()
def write(folder: Path, settings: dict[str, Any], model: nn.Module) -> nn.Module:
    """Write the model with random quantised layers; return it with their values in float32."""
    generator = torch.Generator().manual_seed(1)
    is_awq = settings["quant_method"] == "awq"
    tensors = {}
    for name, module in model.named_modules():
        if not is_linear(module) or (name == "lm_head" and not settings.get("lm_head")):
            continue
        conv = isinstance(module, Conv1D)
        inputs, outputs = module.weight.shape if conv else module.weight.shape[::-1]
        size = inputs if settings["group_size"] == -1 else settings["group_size"]
        q = torch.randint(16, (inputs, outputs), generator=generator)
        scales = torch.rand(inputs // size, outputs, generator=generator).half() / 64
        zeros = torch.randint(16, scales.shape, generator=generator)
        if settings.get("sym"):
            zeros.fill_(8)
        g_idx = torch.arange(inputs) // size
        if settings.get("desc_act"):
            g_idx = g_idx[torch.randperm(inputs, generator=generator)]
        tensors[f"{name}.scales"] = scales
        if is_awq:
            tensors[f"{name}.qweight"] = words_of(awq_columns(q))
            tensors[f"{name}.qzeros"] = words_of(awq_columns(zeros))
        else:
            tensors[f"{name}.qweight"] = words_of(q.T).T.contiguous()
            is_v1 = settings.get("checkpoint_format") == "gptq"
            tensors[f"{name}.qzeros"] = zero_words(zeros, int(is_v1))
            tensors[f"{name}.g_idx"] = g_idx.int()
        weight = (q - zeros[g_idx]) * scales.float()[g_idx]
        module.weight.copy_(weight if conv else weight.T)
    for name, value in model.state_dict().items():
        if f"{name.removesuffix('.weight')}.qweight" not in tensors:
            tensors[name] = value.half()
            value.copy_(tensors[name])
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    model.config.dtype = torch.float16
    model.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, quantization_config=settings)
    model.config.quantization_config = settings
    return model


def check(got: nn.Module, want: nn.Module, dtype: torch.dtype) -> None:
    """Every value of the checkpoint is there, and the model computes with them."""
    layers = packed(got)
    names = [n for n, m in want.named_modules() if is_linear(m)]
    has_head = want.config.quantization_config.get("lm_head", False)
    assert list(layers) == [name for name in names if name != "lm_head" or has_head]
    for name, module in layers.items():
        linear = want.get_submodule(name)
        bias = None if linear.bias is None else linear.bias.to(dtype).float()
        assert (module.bias is None) == (bias is None) and module.weight.dtype == dtype
        if bias is not None:
            assert torch.equal(module.bias, bias)
        module.layer.bias = None
        same(module.layer, linear.weight if isinstance(linear, Conv1D) else linear.weight.T)
        module.layer.bias = bias
    parameters = dict(want.named_parameters())
    for name, parameter in got.named_parameters():
        assert torch.equal(parameter, parameters[name].to(dtype)) and not parameter.requires_grad
    most = 0.04 if dtype == torch.float32 else 0.05  # int8 of the inputs of layers
    assert (logits(got).float() - logits(want)).norm() <= most * logits(want).norm()


@pytest.mark.parametrize("name", FORMATS)
def test_the_values_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    want = write(tmp_path, FORMATS[name], llama())
    got = load_quantized(tmp_path, dtype=torch.float32)
    assert isinstance(got, transformers.LlamaForCausalLM) and not got.training
    check(got, want, torch.float32)
    sizes = {module.layer.group_size for module in packed(got).values()}
    assert sizes == {128 if FORMATS[name]["group_size"] == -1 else FORMATS[name]["group_size"]}


@pytest.mark.parametrize("settings", [AWQ, MIXED], ids=["awq", "gptq"])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_dtypes(settings: dict[str, Any], dtype: torch.dtype | None, tmp_path: Path) -> None:
    """Scales are those of the checkpoint whatever the dtype of the other weights."""
    want = write(tmp_path, settings, llama())
    got = load_quantized(tmp_path, **({} if dtype is None else {"dtype": dtype}))
    check(got, want, dtype or torch.float16)
    assert logits(got).dtype == (dtype or torch.float16)


@pytest.mark.parametrize("settings", [AWQ, V2], ids=["awq", "gptq"])
def test_other_models(settings: dict[str, Any], tmp_path: Path) -> None:
    """GPT-2's layers have their weight the other way round; a head that is tied."""
    for number, model in enumerate((gpt2(), llama(tie_word_embeddings=True))):
        folder = tmp_path / str(number)
        want = write(folder, {**settings, "group_size": 64}, model)
        check(load_quantized(str(folder), dtype=torch.float32), want, torch.float32)


@pytest.mark.parametrize("settings", [AWQ, MIXED], ids=["awq", "gptq"])
def test_the_default_device_is_not_looked_at(settings: dict[str, Any], tmp_path: Path) -> None:
    want = write(tmp_path, settings, llama())
    with torch.device("meta"):
        got = load_quantized(tmp_path, dtype=torch.float32)
    check(got, want, torch.float32)


def test_generate_and_a_packed_head(tmp_path: Path) -> None:
    want = write(tmp_path, MIXED, llama(tie_word_embeddings=True))
    got = load_quantized(
        tmp_path, dtype=torch.float32, model_class=transformers.LlamaForCausalLM,
        attn_implementation="eager",
    )  # fmt: skip
    assert got.config._attn_implementation == "eager"
    options = dict(max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(IDS))
    ids = got.generate(IDS, **options)
    assert ids.shape == (2, 21) and ids[:, :9].equal(IDS)
    # What is left is packed by pack_linears_, what was packed stays.
    layers = list(packed(got).values())
    pack_linears_(got, "float32")
    assert isinstance(got.lm_head, PackedLinearModule) and list(packed(got).values())[:-1] == layers
    assert torch.equal(got.generate(IDS, **options), ids)
    assert (logits(got) - logits(want)).norm() <= 0.04 * logits(want).norm()
    with pytest.raises(ValueError, match="not serializable"):
        got.save_pretrained(tmp_path / "saved")


def test_several_files_and_their_index(tmp_path: Path) -> None:
    """The tensors of a layer may lie in several files."""
    want = write(tmp_path, AWQ, llama())
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    files: dict[str, str] = {}
    for number in range(3):
        file = f"model-{number + 1:05}-of-00003.safetensors"
        part = dict(list(tensors.items())[number::3])
        save_file(part, tmp_path / file, {"format": "pt"})
        files.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": files}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check(load_quantized(tmp_path, dtype=torch.float32), want, torch.float32)


@pytest.mark.parametrize("case", ["", "pytorch_model.bin", "names of AutoModel", "AutoModel"])
def test_biases_that_the_checkpoint_alone_has(case: str, tmp_path: Path) -> None:
    """Older programs that write GPTQ's checkpoints give every layer a bias."""
    want = write(tmp_path, GPTQ, llama(attention_bias=False))
    tensors = load_file(tmp_path / "model.safetensors")
    for name, module in want.named_modules():
        if is_linear(module) and name != "lm_head":
            tensors[f"{name}.bias"] = torch.randn(len(module.weight)).half()
            module.bias = nn.Parameter(tensors[f"{name}.bias"].float())
    if case == "names of AutoModel":
        tensors = {name.removeprefix("model."): value for name, value in tensors.items()}
    if case == "pytorch_model.bin":
        (tmp_path / "model.safetensors").unlink()
        torch.save(tensors, tmp_path / case)
    else:
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    if case == "AutoModel":  # it has no head
        got = llama().requires_grad_(False)
        got.model = load_quantized(
            tmp_path, dtype=torch.float32, model_class=transformers.AutoModel
        )  # fmt: skip
        got.lm_head.load_state_dict(want.lm_head.state_dict())
    else:
        got = load_quantized(tmp_path, dtype=torch.float32)
    check(got, want, torch.float32)


def test_a_quantised_head_stays_apart_where_the_config_ties_it(tmp_path: Path) -> None:
    """As transformers unties a head that differs from the embedding."""
    want = write(tmp_path, {**AWQ, "lm_head": True}, llama())
    change_config(tmp_path, tie_word_embeddings=True)
    check(load_quantized(tmp_path, dtype=torch.float32), want, torch.float32)


@pytest.mark.parametrize("written", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("told", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("sym", [True, None])
def test_zeros_of_symmetric_layers_are_8(
    written: str, told: str, sym: bool | None, tmp_path: Path
) -> None:
    """Files that say "gptq" and hold the zeros of "gptq_v2" are published."""
    want = write(tmp_path, {**GPTQ, "sym": True, "checkpoint_format": written}, llama())
    change_config(tmp_path, quantization_config={**GPTQ, "sym": sym, "checkpoint_format": told})
    check(load_quantized(tmp_path, dtype=torch.float32), want, torch.float32)


def test_layers_that_differ_from_the_symmetric_ones(tmp_path: Path) -> None:
    want = write(tmp_path, GPTQ, llama())
    dynamic = {"+:.*mlp.*": {"sym": False}, "-:lm_head": {}}
    change_config(tmp_path, quantization_config={**GPTQ, "sym": True, "dynamic": dynamic})
    check(load_quantized(tmp_path, dtype=torch.float32), want, torch.float32)


Q_PROJ, UP_PROJ = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (None, "config.json has no quantization_config; expected that of a checkpoint of AWQ or"),
        ({}, "quant_method of quantization_config is None; expected 'awq' or 'gptq'"),
        ({**AWQ, "quant_method": "hqq"}, "quant_method of quantization_config is 'hqq'"),
        ({**AWQ, "bits": 8}, "bits of quantization_config is 8; expected 4"),
        ({**GPTQ, "bits": 3}, "bits of quantization_config is 3; expected 4"),
        ({**AWQ, "version": "gemv"}, "version of quantization_config is 'gemv'; expected 'gemm'"),
        ({**GPTQ, "checkpoint_format": "marlin"},
         "checkpoint_format of quantization_config is 'marlin'; expected 'gptq' or 'gptq_v2'"),
        ({"quant_method": "gptq", "bits": 4, "format": "bitblas"}, "format of .* is 'bitblas'"),
        ({**AWQ, "group_size": 48}, "group_size of .* is 48; expected 32 or 64 or 128 or -1"),
        ("awq", "quantization_config of .*config.json is 'awq'; expected names and values"),
        ({**AWQ, "group_size": 64}, r"proj.scales has shape \[\d+, \d+\]; expected \["),
        ({**GPTQ, "group_size": 32}, r"model.layers.0.\S+: packed_from_gptq: "),
        ({**GPTQ, "sym": True}, r"model.layers.0.\S+: .*sym is True, and qzeros has others than 7"),
        ({**GPTQ, "sym": "yes"}, "sym of quantization_config is 'yes'; expected None or False"),
    ],
)  # fmt: skip
def test_other_checkpoints(
    settings: dict[str, Any] | str | None, message: str, tmp_path: Path
) -> None:
    write(tmp_path, AWQ, llama())
    change_config(tmp_path, quantization_config=settings)
    with pytest.raises(ValueError, match=f"^load_quantized: .*{message}"):
        load_quantized(tmp_path)


def _drop(*names: str) -> Callable[[dict], None]:
    return lambda tensors: [tensors.pop(name) for name in names] and None


def _set(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict], None]:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_drop(f"{Q_PROJ}.scales"), f"the checkpoint lacks {Q_PROJ}.scales"),
        (_drop(f"{Q_PROJ}.qzeros"), f"the checkpoint lacks {Q_PROJ}.qzeros"),
        (_drop(f"{Q_PROJ}.qweight"), f"the checkpoint lacks {Q_PROJ}.qweight"),
        (_drop(*(f"{Q_PROJ}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))),
         f"the checkpoint lacks {Q_PROJ}.weight"),
        (_drop("model.norm.weight"), "the checkpoint lacks model.norm.weight"),
        (_drop(f"{Q_PROJ}.bias"), f"the checkpoint lacks {Q_PROJ}.bias"),
        (_set(f"{UP_PROJ}.scales", lambda t: t[:, :-8]), f"{UP_PROJ}.scales has shape"),
        (_set(f"{UP_PROJ}.qzeros", lambda t: t[:, :-1]), f"{UP_PROJ}: packed_from_gptq: qzeros"),
        (_set(f"{UP_PROJ}.qweight", lambda t: t[:-4]), f"{UP_PROJ}.*: packed_from_gptq:"),
        (_set(f"{UP_PROJ}.qweight", lambda t: t.long()), "qweight has dtype int64"),
        (_set(f"{UP_PROJ}.scales", lambda t: t.float() + 1e-9), "scales holds numbers that float1"),
        (_set(f"{UP_PROJ}.g_idx", lambda t: t * 0), f"{UP_PROJ}: packed_from_gptq: g_idx does"),
        (_drop(*(f"model.layers.{n}.post_attention_layernorm.weight" for n in (0, 1)),
               "model.norm.weight", "lm_head.weight"), "layernorm.weight and 1 more"),
        (lambda tensors: tensors.update({
            f"model.norm.{part}": torch.ones(3).int() for part in ("qweight", "qzeros", "scales")}),
         "model.norm is a LlamaRMSNorm; expected a linear layer"),
    ],
)  # fmt: skip
def test_damaged_checkpoints(edit: Callable[[dict], None], message: str, tmp_path: Path) -> None:
    _refused(GPTQ, edit, message, tmp_path)


def _refused(
    settings: dict[str, Any], edit: Callable[[dict], None], message: str, folder: Path
) -> None:
    write(folder, settings, llama())
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"^load_quantized: .*{message}"):
        load_quantized(folder)


@pytest.mark.parametrize("settings", [AWQ, GPTQ], ids=["awq", "gptq"])
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_set(f"{UP_PROJ}.scales", lambda t: t.int()), f"{UP_PROJ}: .* scales has dtype int32"),
        (_set(f"{UP_PROJ}.scales", lambda t: t / 0), f"{UP_PROJ}: .* scales holds infinities"),
        (lambda tensors: tensors.update({f"{UP_PROJ}.weight": torch.ones(256, 128).half()}),
         f"the checkpoint has {UP_PROJ}.weight beside {UP_PROJ}.qweight"),
        (_set(f"{Q_PROJ}.bias", lambda t: t[:3]),
         rf"{Q_PROJ}.bias has shape \[3\]; expected \[128\]"),
        (_set("model.norm.weight", lambda t: t[:3]),
         r"model.norm.weight has shape \[3\]; expected \[128\]"),
    ],
)  # fmt: skip
def test_damaged_layers(
    settings: dict[str, Any], edit: Callable[[dict], None], message: str, tmp_path: Path
) -> None:
    _refused(settings, edit, message, tmp_path)


@pytest.mark.skipif(BEFORE_5_1, reason="transformers 5.0 makes no tensors of quantised models anew")
def test_sizes_that_may_differ(tmp_path: Path) -> None:
    """transformers' option: what has another shape is made anew."""
    write(tmp_path, AWQ, llama())
    change_config(tmp_path, vocab_size=208)
    got = load_quantized(tmp_path, ignore_mismatched_sizes=True)
    assert got.lm_head.weight.shape == (208, 128) and len(packed(got)) == 14


def test_biases_that_have_no_place(tmp_path: Path) -> None:
    """Names that an option maps are not known when room is made."""
    write(tmp_path, AWQ, llama())
    change_config(tmp_path, attention_bias=False)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {f"foo.{name}".replace("foo.model.", "foo."): t for name, t in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"has model\.layers\.0\S+_proj.bias; expected no"):
        load_quantized(tmp_path, key_mapping={"^foo.lm_head": "lm_head", "^foo": "model"})


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("content", ["cut", "other"])
def test_damaged_files(file: str, content: str, tmp_path: Path) -> None:
    write(tmp_path, AWQ, llama())
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    path = tmp_path / file
    if file == "model.safetensors":
        save_file(tensors, path, {"format": "pt"})
    else:
        torch.save(tensors, path)
    path.write_bytes(path.read_bytes()[:-100] if content == "cut" else b"hello world" * 10)
    with pytest.raises(ValueError, match=f"^load_quantized: .*{file} cannot be read: "):
        load_quantized(tmp_path)


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="folder is of type int; expected a str or a path"):
        load_quantized(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model_class is of type str; expected a class with from_"):
        load_quantized(tmp_path, model_class="llama")
    for name in ("config", "quantization_config", "output_loading_info"):
        with pytest.raises(ValueError, match=f"load_quantized: {name} is given; expected none"):
            load_quantized(tmp_path, **{name: None})
    with pytest.raises(FileNotFoundError, match="expected a model's folder"):
        load_quantized(tmp_path)
    quantizer = AutoHfQuantizer.from_config(_QuantizedConfig(AWQ), pre_quantized=True)
    with pytest.raises(ValueError, match="load_quantized: device_map asks for 'cuda'"):
        quantizer.validate_environment(device_map="cuda")
