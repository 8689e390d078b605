"""Weights of a folder that predict further tokens: against transformers' layers, and saved."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lmdecode
from lmdecode.decoder.causal_caches import CausalCaches
from lmdecode.models.record import record_bytes
from lmdecode.reference.causal import causal_hidden, causal_logits
from tests.support.causal_models import random_tokens
from tests.support.mtp_models import MtpModel, mtp_model, write_folder

CASES = [
    ("qwen3_5_text", "plain"), ("qwen3_5_text", "delta rule last, biases"),
    ("qwen3_5", "text part"), ("qwen3_5_moe_text", "plain"), ("qwen3_5_moe", "text part"),
    ("qwen3_next", "experts and dense layers"), ("qwen3_next", "dense"),
]  # fmt: skip


@pytest.fixture(scope="module", params=CASES, ids=lambda case: ", ".join(case))
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[MtpModel, Path]:
    model, folder = mtp_model(*request.param), tmp_path_factory.mktemp("model")
    write_folder(model, folder, one_by_one=request.param[0].startswith("qwen3_next"))
    return model, folder


def loaded(folder: Path, **options: Any) -> Any:
    return lmdecode.Decoding.from_pretrained(folder, mtp=True, **options)


def run(
    packed: Any, tokens: torch.Tensor, parts: list[int], hidden: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and hidden rows of a text that is read in parts."""
    caches = CausalCaches(packed, 2, 80, max_rows=7)
    logits, out, at = [], torch.empty(len(tokens), packed.config.model_size), 0
    for number, count in enumerate(parts):
        entry = torch.tensor([[1, count, int(number == 0), count]])
        given = None if hidden is None else hidden[at : at + count].contiguous()
        logits.append(
            caches.forward(
                tokens[at : at + count], entry, count, hidden_in=given,
                hidden_out=out[at : at + count],
            )
        )  # fmt: skip
        at += count
    return torch.cat(logits), out


def test_logits_and_hidden_rows_are_those_of_the_layer_of_transformers(
    written: tuple[MtpModel, Path],
) -> None:
    model, folder = written
    packed = loaded(folder).decoder
    tokens = random_tokens(40)
    expected_hidden = model.hidden(tokens)
    logits, hidden = run(packed, tokens, [30, 4, 6], None)
    torch.testing.assert_close(hidden, expected_hidden, atol=1e-4, rtol=1e-4)
    plain = CausalCaches(packed, 1, 80)
    assert plain.forward(tokens[:30], torch.tensor([[0, 30, 1, 2]]), 2).equal(logits[28:30])

    expected = model.read(tokens[1:], expected_hidden[:-1])
    got = run(packed.mtp, tokens[1:], [29, 4, 6], expected_hidden[:-1])
    for values, right in zip(got, expected, strict=True):
        torch.testing.assert_close(values, right, atol=1e-4, rtol=1e-4)


def test_the_reference_is_transformers(written: tuple[MtpModel, Path]) -> None:
    from lmdecode.readers.transformers.models import load_parts

    model, folder = written
    _, config, weights = load_parts(folder, mtp=True)
    tokens = random_tokens(24)
    hidden = model.hidden(tokens)
    dense = [
        layer._replace(
            **{
                name: [read(i) for i in range(config.experts.num_experts)]
                for name in ("experts_gate", "experts_up", "experts_down")
                if callable(read := getattr(layer, name))
            }
        )
        for layer in weights.mtp[1].layers
    ]
    of_mtp, ours = weights.mtp[0], weights.mtp[1]._replace(layers=dense)
    logits, expected = model.read(tokens[1:], hidden[:-1])
    options = {"hidden": hidden[:-1]}
    got = causal_hidden(of_mtp, ours, tokens[1:], **options)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    got = causal_logits(of_mtp, ours, tokens[1:], **options)
    torch.testing.assert_close(got, logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_it_is_saved_and_shares_the_memory(
    written: tuple[MtpModel, Path], dtype: str, tmp_path: Path
) -> None:
    _, folder = written
    decoding = loaded(folder, dtype=dtype)
    packed = decoding.decoder
    begin = record_bytes(packed.config.num_layers)
    assert packed.mtp.memory.data_ptr() == packed.memory.data_ptr() + begin
    without = lmdecode.Decoding.from_pretrained(folder, dtype=dtype)
    assert without.decoder.mtp is None
    own = packed.memory[: packed.own_bytes].clone()
    own[begin : begin + record_bytes(1)] = 0  # its record
    assert without.decoder.memory.equal(own)
    assert without.fingerprint() == decoding.fingerprint()
    decoding.save(tmp_path)
    again = lmdecode.Decoding.load(tmp_path, verify=True)
    tokens, hidden = random_tokens(9), torch.randn(9, packed.config.model_size)
    expected = run(packed.mtp, tokens, [5, 4], hidden)
    for values, right in zip(run(again.decoder.mtp, tokens, [5, 4], hidden), expected, strict=True):
        assert values.equal(right)
    assert again.fingerprint() == decoding.fingerprint()


def test_rows_have_the_same_bits_in_any_parts(written: tuple[MtpModel, Path]) -> None:
    packed = loaded(written[1]).decoder.mtp
    tokens, hidden = random_tokens(30), torch.randn(30, packed.config.model_size)
    expected = run(packed, tokens, [20, 10], hidden)
    caches = CausalCaches(packed, 2, 80)
    for parts in ([1, 19], [13, 7]):
        at, out = 0, torch.empty(20, packed.config.model_size)
        for count in parts:
            caches.forward(
                tokens[at : at + count], torch.tensor([[0, count, 1, 0]]), 0,
                hidden_in=hidden[at : at + count].contiguous(), hidden_out=out[at : at + count],
            )  # fmt: skip
            at += count
        assert out.equal(expected[1][:20])
        caches.truncate([0], [0])


def test_what_is_refused(tmp_path: Path) -> None:
    model = mtp_model(*CASES[0])
    write_folder(model, tmp_path)
    packed = loaded(tmp_path).decoder
    entry, token = torch.tensor([[0, 1, 0, 1]]), torch.tensor([5])
    row = torch.zeros(1, packed.config.model_size)
    with pytest.raises(ValueError, match="hidden_in is given; expected None"):
        CausalCaches(packed, 1, 8).forward(token, entry, 1, hidden_in=row)
    with pytest.raises(ValueError, match="hidden_in is None; expected it"):
        CausalCaches(packed.mtp, 1, 8).forward(token, entry, 1)
    with pytest.raises(ValueError, match=r"hidden_out has shape \[2, "):
        CausalCaches(packed, 1, 8).forward(token, entry, 1, hidden_out=row.repeat(2, 1))
    with pytest.raises(
        ValueError, match="mtp is True for a Qwen3_5ForCausalLM; expected a folder or"
    ):
        loaded(model.model)  # type: ignore[arg-type]
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name, changed, message in (
        ("more", {**tensors, "mtp.layers.1.norm.weight": row}, "1 more tensors of mtp"),
        ("less", {k: v for k, v in tensors.items() if "mtp.fc" not in k}, "no mtp.fc.weight of"),
        ("none", {k: v for k, v in tensors.items() if "mtp" not in k}, "no mtp.layers.0"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        for file in ("config.json", "generation_config.json"):
            shutil.copy(tmp_path / file, folder)
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            loaded(folder)
        lmdecode.Decoding.from_pretrained(folder)
