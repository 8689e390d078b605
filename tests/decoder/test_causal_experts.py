"""Experts of folders: their tensors by every name, and blocks of MXFP4 as they are."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lmdecode
from lmdecode.readers.transformers.checkpoint import Checkpoint, mxfp4_weight
from lmdecode.readers.transformers.stand_in import skeleton_of
from tests.support.causal_models import model_of, random_config, random_model, random_tokens

NEW = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
NUMBERS = (0, 0.5, 1, 1.5, 2, 3, 4, 6)  # of the codes of FP4, of which eight more are negative


@pytest.mark.parametrize(
    "case",
    [
        ("qwen3_moe", "normalized, dense layers, window"),
        ("gpt_oss", "plain"),
        ("olmoe", "plain"),
        ("granitemoe", "multipliers, biases"),
        ("granitemoeshared", "shared"),
        ("granitemoehybrid", "experts, multipliers"),
        ("lfm2_moe", "plain"),
        ("qwen3_5_moe", "text part"),
        ("qwen3_next", "experts and dense layers"),
        ("gemma4_text", "all experts"),
    ],
    ids=str,
)
def test_folders_are_read_matrix_by_matrix(case: tuple[str, str], tmp_path: Path) -> None:
    model = random_model(*case)
    model.save_pretrained(tmp_path)
    assert Checkpoint.of(tmp_path, skeleton_of(tmp_path)) is not None
    ids = random_tokens(12)[None]
    decoding = lmdecode.Decoding.from_pretrained(tmp_path)
    assert decoding.generate(ids, **NEW).equal(model.generate(ids, **NEW))
    decoding.save(tmp_path / "saved")
    assert (
        lmdecode.Decoding.load(tmp_path / "saved")
        .generate(ids, **NEW)
        .equal(model.generate(ids, **NEW))
    )


def _floats(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([*NUMBERS, *(-number for number in NUMBERS)])
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).long()
    return (table[codes] * torch.exp2(scales[..., None].float() - 127)).flatten(-2)


def test_blocks_of_mxfp4_are_repacked_exactly() -> None:
    blocks = torch.randint(0, 256, (5, 3, 16), dtype=torch.uint8)
    scales = torch.randint(120, 130, (5, 3), dtype=torch.uint8)
    assert mxfp4_weight(blocks, scales).dequantize().equal(_floats(blocks, scales))


def _mxfp4_folder(folder: Path) -> Any:
    """Write a gpt-oss in MXFP4; return the model with the same numbers as floats."""
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    model = model_of(random_config("gpt_oss", "plain", **sizes))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    # With 5 of 40 seeds rounded inputs move the logits by more than a tenth, with this one 0.024.
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, inputs, outputs = parameter.shape
        shape = (experts, outputs, inputs // 32, 16)
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 125, shape[:3], dtype=torch.uint8, generator=generator)
        parameter.data = _floats(blocks, scales).mT.contiguous()
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def test_a_folder_of_mxfp4(tmp_path: Path) -> None:
    model, ids = _mxfp4_folder(tmp_path), random_tokens(12)[None]
    expected = model.generate(ids, **NEW)
    decoding = lmdecode.Decoding.from_pretrained(tmp_path)
    assert decoding.generate(ids, **NEW).equal(expected)
    as_it_is = lmdecode.Decoding.from_pretrained(tmp_path, None)
    assert len(as_it_is.decoder.memory) < 0.6 * len(decoding.decoder.memory)
    options = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
    ours, theirs = (m.generate(ids, **options).logits[0] for m in (as_it_is, model))
    assert (ours - theirs).norm() < 0.1 * theirs.norm()  # inputs are rounded, too
    as_it_is.save(tmp_path / "saved")
    loaded = lmdecode.Decoding.load(tmp_path / "saved", verify=True)
    assert loaded.generate(ids, **options).logits[0].equal(ours)


def test_clipped_projections_are_refused() -> None:
    model = model_of(random_config("olmoe", "plain", clip_qkv=1.0))
    with pytest.raises(ValueError, match=r"clip_qkv is 1\.0; expected False"):
        lmdecode.Decoding.from_pretrained(model)
