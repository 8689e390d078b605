"""Decoding.from_pretrained(): models and their folders, formats of weights, what is refused."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import BloomConfig, MvpConfig

import lmdecode
from lmdecode.integrations.transformers import pack_linears_
from lmdecode.models.packed_stack import PackedDecoder
from tests.decoder.decoder_models import make_inputs, make_model
from tests.support.causal_models import random_model, random_tokens


@pytest.mark.parametrize("kind", ["marian", "t5", "whisper"])
def test_a_model_is_loaded_from_its_folder(kind: str, tmp_path: Path) -> None:
    model = make_model(kind).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    inputs = make_inputs(kind)
    given = lmdecode.Decoding.from_pretrained(model.float())
    expected = given.generate(**inputs, num_beams=2, max_new_tokens=8)
    for name in (tmp_path, str(tmp_path)):
        decoding = lmdecode.Decoding.from_pretrained(name)
        assert {tensor.dtype for tensor in decoding.model.parameters()} == {torch.float32}
        assert not decoding.model.training
        got = decoding.generate(**inputs, num_beams=2, max_new_tokens=8)
        assert got.tolist() == expected.tolist()


def test_a_model_that_is_not_kept() -> None:
    model = copy.deepcopy(random_model("llama", "plain")).to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    decoding = lmdecode.Decoding.from_pretrained(model, keep_model=False)
    assert decoding.model is not model and type(decoding.model) is type(model)
    assert all(set(p.stride()) == {0} for p in decoding.model.parameters())  # one value each
    assert model.config.dtype == torch.bfloat16
    ids, options = random_tokens(7)[None], {"max_new_tokens": 6, "do_sample": False}
    want = lmdecode.Decoding.from_pretrained(model).generate(ids, **options)
    assert torch.equal(decoding.generate(ids, **options), want)


def test_a_folder_of_another_model(tmp_path: Path) -> None:
    BloomConfig(n_layer=1, hidden_size=8, n_head=1, vocab_size=11).save_pretrained(tmp_path)
    types = "cohere, cohere2, falcon_h1, .*"
    expected = rf"a causal language model of {types}; for other models there is .*pack_linears_"
    with pytest.raises(ValueError, match=rf"has a model of type 'bloom'; expected {expected}"):
        lmdecode.Decoding.from_pretrained(tmp_path)
    MvpConfig(d_model=8, vocab_size=11).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has a model of type 'mvp'; expected .* marian"):
        lmdecode.Decoding.from_pretrained(tmp_path)


class OnCuda(torch.Tensor):
    """A tensor that says it is on a CUDA device, for machines that have none."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("", "embedding"),
        ("lm_head", "logits"),
        ("model.norm", "final_norm_gamma"),
        ("model.layers.1", r"layers\[1\]\.attention_norm_gamma"),
    ],
)
def test_a_decoder_only_model_on_cuda_is_refused(part: str, name: str) -> None:
    """All of it, or a part, as a map of devices may place it."""
    model = copy.deepcopy(random_model("llama", "plain"))
    if torch.cuda.is_available():
        model.get_submodule(part).to("cuda")
    else:
        for module in model.get_submodule(part).modules():
            for key, value in module.named_parameters(recurse=False):
                there = torch.nn.Parameter(value.detach().as_subclass(OnCuda), requires_grad=False)
                setattr(module, key, there)
    message = rf"weights\.{name} is on cuda:0; expected cpu, where decoder-only models run$"
    with pytest.raises(ValueError, match=message):
        lmdecode.Decoding.from_pretrained(model)


@pytest.mark.parametrize("part", ["", "lm_head", "model.layers.1.mlp"])
def test_weights_that_are_not_loaded_are_refused(part: str) -> None:
    """The device "meta" holds those that a map of devices left on the disk."""
    model = copy.deepcopy(random_model("llama", "plain"))
    model.get_submodule(part).to("meta")
    with pytest.raises(ValueError, match=rf"weights of {part}[\w.]* are not loaded; expected f"):
        lmdecode.Decoding.from_pretrained(model)


def test_a_folder_that_save_wrote(tmp_path: Path) -> None:
    lmdecode.Decoding.from_pretrained(random_model("llama", "plain")).save(tmp_path)
    with pytest.raises(OSError, match=r"was written by Decoding\.save; expected Decoding\.load"):
        lmdecode.Decoding.from_pretrained(tmp_path)
    with pytest.raises(OSError, match="none"):
        lmdecode.Decoding.from_pretrained(tmp_path / "none")


def test_what_is_no_model() -> None:
    config = random_model("llama", "plain").config
    with pytest.raises(ValueError, match=r"model is a LlamaConfig of type 'llama'; .* the folder"):
        lmdecode.Decoding.from_pretrained(config)


@pytest.mark.parametrize(
    ("method", "others"),
    [
        ("awq", "checkpoints of AWQ and GPTQ there is .*load_quantized$"),
        ("gptq", "checkpoints of AWQ and GPTQ there is .*load_quantized$"),
        ("fp8", "other models there is .*pack_linears_$"),
    ],
)
def test_a_folder_of_a_quantized_model(method: str, others: str, tmp_path: Path) -> None:
    config = copy.deepcopy(random_model("llama", "plain").config)
    config.quantization_config = {"quant_method": method, "bits": 4}
    config.save_pretrained(tmp_path)
    expected = rf"are quantized \({method}\); expected floats; for {others}"
    with pytest.raises(
        ValueError, match=rf"^Decoding\.from_pretrained: the weights of .* {expected}"
    ):
        lmdecode.Decoding.from_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bf16", "torch.bfloat16"], ids=str)
def test_spellings_of_a_format(dtype: Any) -> None:
    model = make_model("marian")
    decoder = lmdecode.Decoding.from_pretrained(model, dtype=dtype).decoder
    expected = lmdecode.Decoding.from_pretrained(model, "bfloat16").decoder
    assert isinstance(decoder, PackedDecoder) and isinstance(expected, PackedDecoder)
    assert decoder.weight_format == "bfloat16"
    assert all(map(torch.equal, decoder.of_model, expected.of_model))
    config, weights = _config_and_weights()
    layer = lmdecode.DecoderLayer(config, weights.layers[0], dtype=dtype)
    expected_layer = lmdecode.DecoderLayer(config, weights.layers[0], dtype="bfloat16")
    assert all(map(torch.equal, layer._packed.of_model, expected_layer._packed.of_model))


def test_other_models_and_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="model is a Linear of type None"):
        lmdecode.Decoding.from_pretrained(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="dtype is 'float16'"):
        lmdecode.Decoding.from_pretrained(make_model("marian"), dtype="float16")
    with pytest.raises(ValueError, match="there is no model"):
        lmdecode.Decoding(*_config_and_weights()).generate(torch.zeros(1, 1, dtype=torch.int64))


def _config_and_weights() -> tuple[Any, Any]:
    from lmdecode.readers.transformers.encoder_decoder import decoder_of

    return decoder_of(make_model("marian"))


def test_what_stands_in_for_a_model_says_so(tmp_path: Path) -> None:
    """Of a folder there are no weights but the packed ones: nothing computes with others unseen."""
    model = random_model("llama", "plain")
    model.save_pretrained(tmp_path)
    decoding = lmdecode.Decoding.from_pretrained(tmp_path)
    ids = torch.tensor([[5, 9, 7]])
    expected = decoding.generate(ids, max_new_tokens=3)
    stand_in = decoding.model
    for run in (
        lambda: stand_in(ids),
        lambda: stand_in.generate(ids, max_new_tokens=3),
        lambda: decoding.generate(ids, guidance_scale=2.0, max_new_tokens=3),
    ):
        with pytest.raises(RuntimeError, match=r"^LlamaForCausalLM: .* has no weights; expected"):
            run()
    for take in (lmdecode.Decoding.from_pretrained, pack_linears_):
        with pytest.raises(ValueError, match=r"model stands in .* no weights; expected a model"):
            take(stand_in)
    copied = pickle.loads(pickle.dumps(decoding))
    for other in (copied, copy.deepcopy(decoding)):
        assert other.generate(ids, max_new_tokens=3).equal(expected)
    stand_in.generate = decoding.generate  # as pipelines call it
    assert stand_in.generate(ids, max_new_tokens=3).equal(expected)
    whole = lmdecode.Decoding.from_pretrained(model)  # guidance runs the model itself
    guided = model.generate(ids, guidance_scale=2.0, max_new_tokens=3, do_sample=False)
    assert whole.generate(ids, guidance_scale=2.0, max_new_tokens=3).equal(guided)


@pytest.mark.parametrize("name", ["BartModel", "BartForSequenceClassification"])
def test_a_model_without_logits_is_refused(name: str) -> None:
    model = make_model("bart")
    headless = getattr(transformers, name)(model.config)
    message = rf"model is a {name}, which gives no logits; expected .* AutoModelForSeq2SeqLM"
    with pytest.raises(ValueError, match=message):
        lmdecode.Decoding.from_pretrained(headless)


def test_what_is_not_there_and_what_has_no_values_of_its_own(tmp_path: Path) -> None:
    for name in (tmp_path / "none", str(tmp_path / "none"), "./none", "none.gguf"):
        with pytest.raises(FileNotFoundError, match=r"there is no file or folder '.*none"):
            lmdecode.Decoding.from_pretrained(name)
    model = make_model("t5")
    model.save_pretrained(tmp_path)
    for source in (model, tmp_path):
        with pytest.raises(ValueError, match=r"dtype is None for .*; expected a format, as GGUF"):
            lmdecode.Decoding.from_pretrained(source, None)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(FileNotFoundError, match=r"has no lmdecode\.json; expected a folder that"):
        lmdecode.Decoding.load(file)
