"""``LmdecodeConfig``: models that are packed while they load."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_pack_linears import MODELS, is_counted, llama, logits, packed
from torch import nn
from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

from lmdecode import PackedLinear
from lmdecode.integrations.transformers import LmdecodeConfig, PackedLinearModule, pack_linears_
from lmdecode.integrations.transformers.linear import packing


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
