"""Decoding.from_pretrained() of GGUF files of every architecture: the tokens of the models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import lmdecode
from lmdecode.linear.quantized_weight import JoinedWeight, QuantizedWeight
from lmdecode.readers.gguf.model import load_parts
from tests.support.causal_models import model_of, random_config, random_tokens
from tests.support.gguf_files import gguf, tensors_of, write_model
from tests.support.releases import needs_rows_apart

# The variants of tests.support.causal_models that a file of llama.cpp can express.
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("gemma2", "plain", {}),
    ("gemma3_text", "plain", {"num_hidden_layers": 7, "layer_types": None}),
    ("gemma3_text", "capped", {"layer_types": ["sliding_attention"] * 3, "attention_bias": False}),
    ("gemma4_text", "shared keys, inputs of layers", {}),
    ("gemma4_text", "values are keys, biases, untied",
     {"attention_bias": False, "hidden_activation": "gelu_pytorch_tanh"}),
    ("gemma4_text", "all experts", {}),
    ("gemma4_text", "experts, shared keys, inputs of layers",
     {"use_bidirectional_attention": None}),
    ("falcon_h1", "multipliers", {}),
    ("falcon_h1", "norm behind the gate, biases", {"projectors_bias": False}),
    (
        "falcon_h1",
        "norm before the gate, tied",
        # As in llama.cpp, tied logits have the factor of the embedding.
        {"mamba_norm_before_gate": False, "lm_head_multiplier": 1.5},
    ),
    ("gpt2", "plain", {}),
    ("granite", "plain", {}),
    ("granite", "multipliers, biases", {}),
    ("lfm2", "convolutions at the ends", {}),
    ("lfm2", "attention last, two taps, untied", {}),
    ("llama", "plain", {}),
    ("llama", "biases, tied, wide heads", {}),
    ("llama", "linear", {}),
    ("llama", "yarn", {}),
    ("mistral", "window", {}),
    ("mistral", "no window, group of 4", {}),
    ("olmo2", "plain", {}),
    ("olmo2", "groups, biases", {}),
    ("olmo3", "plain", {}),
    ("olmo3", "two kinds of rotary, groups, biases", {}),
    ("phi3", "plain", {}),
    ("phi3", "partial, window", {}),
    ("qwen2", "plain, group of 7", {}),
    ("qwen3", "plain", {}),
    ("qwen3_5_text", "plain", {"rms_norm_eps": 1e-5}),
    ("qwen3_5_text", "delta rule last, biases", {"attention_bias": False}),
    ("lfm2_moe", "plain", {}),
    ("lfm2_moe", "a dense layer, no bias, scale, attention last",
     {"norm_topk_prob": True, "routed_scaling_factor": 1.0, "tie_word_embeddings": True}),
    ("qwen3_5_moe_text", "plain", {}),
    ("qwen3_5_moe_text", "delta rule last, biases", {"attention_bias": False}),
    ("qwen3_next", "experts and dense layers", {"mlp_only_layers": []}),
    (
        "qwen3_next",
        "dense, delta rule last",
        {
            "mlp_only_layers": [],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 52,
            "attention_bias": False,
        },
    ),
    ("smollm3", "layers without positions", {}),
    ("gpt_oss", "plain", {}),
    ("granitemoe", "multipliers, biases", {}),
    ("granitemoehybrid", "experts, multipliers", {}),
    (
        "granitemoehybrid",
        "dense, attention last, rotary, biases",
        {"intermediate_size": 28},  # which is that of the shared one in Granite 4
    ),
    ("granitemoeshared", "shared", {}),
    ("olmoe", "plain", {}),
    ("qwen3_moe", "few of many", {"norm_topk_prob": True, "head_dim": 12}),
]  # fmt: skip
OPTIONS: dict[str, Any] = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
          "IQ4_XS", "MXFP4")  # fmt: skip
# Rows of whole blocks of each type.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}


def _model(kind: str, variant: str, more: dict[str, Any]) -> Any:
    return model_of(random_config(kind, variant, **more))


def _check_tokens(path: Path, model: Any) -> lmdecode.Decoding:
    decoding = lmdecode.Decoding.from_pretrained(path)
    ids = torch.stack([random_tokens(12, seed) for seed in range(3)])
    assert torch.equal(decoding.generate(ids, **OPTIONS), model.generate(ids, **OPTIONS))
    return decoding


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}, {case[1]}")
def test_tokens_are_those_of_the_model(
    case: tuple[str, str, dict[str, Any]], tmp_path: Path
) -> None:
    needs_rows_apart(case[0], case[1])
    model, path = _model(*case), tmp_path / "model.gguf"
    write_model(path, model)
    decoding = _check_tokens(path, model)
    config, own = decoding.model.config, model.config
    kind = "llama" if case == ("mistral", "no window, group of 4", {}) else own.model_type
    assert config.model_type == kind
    assert decoding.model.generation_config.eos_token_id == [own.eos_token_id]


# Transformers' loader takes these; the config is that of a file's defaults in it, too.
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3_text", "gpt2"])
def test_tokens_are_those_of_transformers_own_loader(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")  # which transformers asks for where it reads such a file
    more: dict[str, dict[str, Any]] = {
        "qwen3": {"head_dim": 128},  # which transformers takes from no file
        "gemma3_text": {"head_dim": 256, "query_pre_attn_scalar": 256, "num_hidden_layers": 6,
                        "rope_parameters": None, "layer_types": None},
        "gpt2": {"n_positions": 1024},
    }  # fmt: skip
    model = _model(kind, "plain" if kind != "qwen2" else "plain, group of 7", more.get(kind, {}))
    write_model(tmp_path / "model.gguf", model, _add_words)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    )
    loaded.generation_config = model.generation_config
    _check_tokens(tmp_path / "model.gguf", loaded.eval())


def _add_words(writer: Any) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"w{i}" for i in range(101)])


def test_frequencies_of_llama_3_are_the_files_tensor(tmp_path: Path) -> None:
    model = _model("llama", "llama3", {})
    plain = torch.tensor(500.0) ** -(torch.arange(0, 8, 2) / 8)
    factors = plain / model.model.rotary_emb.inv_freq
    assert not torch.equal(factors, torch.ones(4))
    write_model(tmp_path / "model.gguf", model, **{"rope_freqs.weight": factors})
    _check_tokens(tmp_path / "model.gguf", model)


def test_a_head_of_its_own_where_the_file_has_one(tmp_path: Path) -> None:
    model = _model("gpt2", "plain", {"tie_word_embeddings": False})
    write_model(tmp_path / "model.gguf", model)
    decoding = _check_tokens(tmp_path / "model.gguf", model)
    assert not decoding.model.config.tie_word_embeddings


def test_logits_of_gemma_4_are_capped_by_default(tmp_path: Path) -> None:
    """At 30, as in llama.cpp, where the file does not say."""

    def change(writer: Any) -> None:
        del writer.kv_data[0]["gemma4.final_logit_softcapping"]

    model = _model("gemma4_text", "all experts", {"final_logit_softcapping": 30.0})
    write_model(tmp_path / "model.gguf", model, change)
    decoding = _check_tokens(tmp_path / "model.gguf", model)
    assert decoding.model.config.final_logit_softcapping == 30.0


def test_keys_that_no_layer_of_gemma_4_reads(tmp_path: Path) -> None:
    """Files may have keys and values of layers that take those of others."""
    model = _model("gemma4_text", "shared keys, inputs of layers", {})
    names = ("attn_k", "attn_k_norm", "attn_v")
    own = tensors_of(model)
    more = {f"blk.{i + 2}.{name}.weight": own[f"blk.{i}.{name}.weight"]
            for i in (1, 2) for name in names}  # fmt: skip
    assert not more.keys() & own.keys()
    write_model(tmp_path / "model.gguf", model, **more)
    _check_tokens(tmp_path / "model.gguf", model)
    more["blk.3.attn_v_norm.weight"] = own["blk.0.attn_k_norm.weight"]
    write_model(tmp_path / "model.gguf", model, **more)
    with pytest.raises(ValueError, match="has 1 tensors that its architecture does not have"):
        load_parts(tmp_path / "model.gguf")


@pytest.mark.parametrize("kind", ["F16", "BF16", *BLOCKS])
def test_types_of_tensors(kind: str, tmp_path: Path) -> None:
    """Values are those that the package gguf gives."""
    model, path = _model("llama", "plain", WIDE), tmp_path / "model.gguf"
    write_model(path, model, kinds=lambda name: kind)
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    with torch.no_grad():
        for parameter, name in (("model.embed_tokens", "token_embd"), ("lm_head", "output")):
            tensor = read[f"{name}.weight"]
            values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
            model.get_parameter(f"{parameter}.weight").copy_(values.view(101, 256))
    _, config, weights = load_parts(path)
    assert torch.equal(weights.embedding.float(), model.model.embed_tokens.weight)
    assert torch.equal(weights.logits.float(), model.lm_head.weight)
    assert config.model_size == 256
    # Rows of queries and keys are in pairs: those of the file, in another order.
    file = torch.from_numpy(
        gguf.quants.dequantize(
            read["blk.0.attn_k.weight"].data, read["blk.0.attn_k.weight"].tensor_type
        )
    ).view(2, 32, 2, 256)
    keys = weights.layers[0].qkv[256:384].float().view(2, 2, 32, 256)
    assert torch.equal(keys, file.swapaxes(1, 2))


@pytest.mark.parametrize(
    "case", [("llama", "plain"), ("granite", "plain"), ("phi3", "plain"), ("gemma3_text", "plain")]
)
@pytest.mark.parametrize("head", ["tied", "its own"])
def test_blocks_are_kept(head: str, case: tuple[str, str], tmp_path: Path) -> None:
    """With dtype=None weights are what the file has; their values are those read as floats."""
    more: dict[str, Any] = {**WIDE, "tie_word_embeddings": head == "tied"}
    if case[0] == "gemma3_text":
        more |= {"head_dim": 64, "layer_types": ["sliding_attention"] * 3}
    write_model(tmp_path / "m.gguf", _model(*case, more), kinds=lambda name: "Q4_0")
    _, config, kept = load_parts(tmp_path / "m.gguf", keeps_blocks=True)
    _, same, floats = load_parts(tmp_path / "m.gguf")
    assert config == same
    assert isinstance(kept.embedding, QuantizedWeight)
    assert torch.equal(kept.embedding.dequantize(), floats.embedding)
    assert (kept.logits is None) == (head == "tied")
    for i in range(config.num_layers):
        for name, value in kept.layers[i]._asdict().items():
            expected = getattr(floats.layers[i], name)
            is_linear = name in ("qkv", "attention_out", "ffn_up", "ffn_gate", "ffn_down")
            assert isinstance(value, QuantizedWeight) == is_linear, name
            if is_linear:
                assert value.kind == "Q4_0"
                assert torch.equal(value.dequantize(), expected)
            elif value is not None:
                assert torch.equal(value, expected)


def test_queries_keys_and_values_of_several_types(tmp_path: Path) -> None:
    """As llama-quantize makes them: values have more bits than queries and keys."""
    kinds = {"attn_q": "Q4_0", "attn_k": "Q4_0", "attn_v": "Q6_K", "ffn_down": "F16"}

    def kind_of(name: str) -> str:
        return kinds.get(name.split(".")[-2], "Q5_1")

    write_model(tmp_path / "m.gguf", _model("llama", "plain", WIDE), kinds=kind_of)
    _, _, kept = load_parts(tmp_path / "m.gguf", keeps_blocks=True)
    _, _, floats = load_parts(tmp_path / "m.gguf")
    layer, expected = kept.layers[1], floats.layers[1]
    assert isinstance(layer.qkv, JoinedWeight)
    assert [part.kind for part in layer.qkv.parts] == ["Q4_0", "Q4_0", "Q6_K"]
    assert layer.qkv.shape == (512, 256)
    assert torch.equal(layer.qkv.dequantize(), expected.qkv)
    assert layer.ffn_down.dtype == torch.float32


def test_a_factor_is_folded_into_floats(tmp_path: Path) -> None:
    """Granite's residual multiplier: the weights that have it are no blocks any more."""
    model = _model("granite", "multipliers, biases", WIDE)
    write_model(tmp_path / "m.gguf", model, kinds=lambda name: "Q8_0")
    _, _, kept = load_parts(tmp_path / "m.gguf", keeps_blocks=True)
    _, _, floats = load_parts(tmp_path / "m.gguf")
    assert torch.equal(kept.layers[0].ffn_down, floats.layers[0].ffn_down)
    assert torch.equal(kept.layers[0].attention_out, floats.layers[0].attention_out)
    assert isinstance(kept.layers[0].qkv, QuantizedWeight)


def test_blocks_of_transposed_weights(tmp_path: Path) -> None:
    """GPT-2's are [in, out] in transformers, and [out, in] in files."""
    model = _model("gpt2", "plain", {"n_embd": 64, "n_inner": 96})
    write_model(tmp_path / "m.gguf", model, kinds=lambda name: "Q8_0")
    _, _, kept = load_parts(tmp_path / "m.gguf", keeps_blocks=True)
    _, _, floats = load_parts(tmp_path / "m.gguf")
    for name in ("qkv", "attention_out", "ffn_up", "ffn_down"):
        weight = getattr(kept.layers[0], name)
        assert isinstance(weight, QuantizedWeight)
        assert torch.equal(weight.dequantize(), getattr(floats.layers[0], name))
    assert torch.equal(kept.positions, floats.positions)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_saved_models_give_the_same_tokens(dtype: str, tmp_path: Path) -> None:
    model = _model("qwen3", "plain", {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16})
    write_model(tmp_path / "m.gguf", model, kinds=lambda name: "Q8_0")
    decoding = lmdecode.Decoding.from_pretrained(tmp_path / "m.gguf", dtype)
    decoding.save(tmp_path / "saved")
    loaded = lmdecode.Decoding.load(tmp_path / "saved")
    ids = random_tokens(9)[None]
    assert torch.equal(loaded.generate(ids, **OPTIONS), decoding.generate(ids, **OPTIONS))
    assert loaded.model.generation_config.eos_token_id == [model.config.eos_token_id]


def test_a_file_that_begins_as_one_needs_no_ending(tmp_path: Path) -> None:
    model = _model("llama", "plain", {})
    write_model(tmp_path / "sha256-abcdef", model)  # as Ollama names its files
    _check_tokens(tmp_path / "sha256-abcdef", model)


def test_the_files_names_are_those_of_the_package() -> None:
    """Every tensor of every architecture was written by its name in the package gguf."""
    for case in CASES:
        # Decays and skips of a state have no suffix, and neither has a norm of Falcon-H1.
        known = (".weight", ".bias", ".ssm_a", "_inp.scale", "_exps.scale", ".ssm_d", ".ffn_norm")
        assert all(name.endswith(known) for name in tensors_of(_model(*case)))
