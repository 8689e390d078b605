"""Entries below an architecture's name: each is read, known to have no effect, or refused."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmdecode.formats.gguf import GgufFile, load_tokenizer
from lmdecode.linear.quantized_weight import QuantizedWeight
from lmdecode.readers.gguf.configs import config_entries
from lmdecode.readers.gguf.metadata import READ, REFUSED, WITHOUT_EFFECT, Facts
from lmdecode.readers.gguf.model import load_parts
from tests.readers.gguf.test_gguf_models import CASES
from tests.support.causal_models import model_of, random_config
from tests.support.gguf_checks import check_file_refused, check_tokens
from tests.support.gguf_files import gguf, tensors_of, write_model

# Of Ollama, of older files and of newer ones than the package's.
MORE = {"attention.head_dim", "attention.recurrent_layers", "deepstack_mapping", "image_token_id",
        "mm.", "mrope_sections", "norm_top_k_prob", "rope.global.freq_base", "rope.local.freq_base",
        "rope.mrope_interleaved", "rope.mrope_section", "rope.scale_linear", "ssm.v_head_reordered",
        "vision.", "vision_end_token_id", "vision_start_token_id"}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"


def _keys(names: type) -> Iterator[str]:
    for name, value in vars(names).items():
        if isinstance(value, type):
            yield from _keys(value)
        elif not name.startswith("__") and value.startswith("{arch}."):
            yield value.removeprefix("{arch}.")


def _write(path: Path, case: Any, *entries: Any, **more: Any) -> Any:
    kind, variant, changes = (*case, {})[:3]
    model = model_of(random_config(kind, variant, **changes))
    write_model(path, model, *entries, **more)
    return model


def entry(key: str, value: Any, kind: str | None = None) -> Callable[[Any], None]:
    """Return a change of a writer: an entry has this value, or is left out; of a type by value."""
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}

    def change(writer: Any) -> None:
        name = f"{writer.arch}.{key}"
        writer.kv_data[0].pop(name, None)
        if value is not None:
            getattr(writer, f"add_{kind or kinds[type(value)]}")(name, value)

    return change


def test_every_key_of_the_package_is_in_the_table() -> None:
    """A release of gguf with a new one fails here: read it, or say what becomes of it."""
    known = set(_keys(gguf.constants.Keys))
    assert known - READ - WITHOUT_EFFECT.keys() - REFUSED.keys() == set()
    assert (READ | WITHOUT_EFFECT.keys() | REFUSED.keys()) - known == MORE
    assert REFUSED.keys() & (READ | WITHOUT_EFFECT.keys()) == {"expert_count"}


def test_what_the_table_calls_read_is_read(tmp_path: Path) -> None:
    asked = set[str]()
    for case in (*CASES, ("gemma3_text", "plain", {})):
        mark = entry("rope.local.freq_base", 1e4) if case[0] == "gemma3_text" else lambda w: None
        _write(tmp_path / "m.gguf", case, mark)
        facts = Facts(GgufFile(tmp_path / "m.gguf"))
        config_entries(facts)
        asked |= facts.asked
    assert asked - {"full_attention_interval"} == READ - {"full_attention_interval"}


OTHERS: list[tuple[Any, str, Any, str]] = [
    (("llama", "plain"), "attention.causal", False, "with which a token sees those behind it"),
    (("llama", "plain"), "attention.clamp_kqv", 8.0, "which bounds or scales what attention comp"),
    (("llama", "plain"), "logit_scale", 0.5, "which is of other architectures; expected none"),
    (("llama", "plain"), "rope.freq_base_swa", 5.0, "which is of other architectures; expected no"),
    (("llama", "plain"), "kda.head_dim", 8, "which is of other architectures; expected none"),
    (("qwen3_moe", "few of many"), "expert_weights_norm", False, "which says how experts are cho"),
    (("qwen3_moe", "few of many"), "expert_group_count", 2, "which says how experts are chosen"),
    (("qwen3_moe", "few of many"), "norm_top_k_prob", False, "which says how experts are chosen"),
    (("qwen3_5_text", "plain"), "ssm.v_head_reordered", False, "with which value heads are in an"),
    (("qwen2", "plain, group of 7"), "attention.sliding_window", 7, "which is of other architec"),
    (("gemma2", "plain"), "unheard_of", "new", "which lmdecode does not know; expected none (if "
     "logits do not depend on it, gguf-new-metadata --remove-metadata leaves it out)"),
    (("granite", "plain"), "rope.scaling.finetuned", False, "has False for rope.scaling.finetune"),
    (("gpt_oss", "plain"), "rope.freq_base_swa", 5.0, "which is of other architectures"),
]  # fmt: skip


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: f"{case[0][0]} {case[1]}")
def test_an_entry_that_nobody_reads_is_refused_by_name(
    case: tuple[Any, str, Any, str], tmp_path: Path
) -> None:
    which, key, value, message = case
    _write(tmp_path / "m.gguf", which, entry(key, value))
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        load_parts(tmp_path / "m.gguf")
    assert key in str(raised.value)


def test_entries_without_effect_change_nothing(tmp_path: Path) -> None:
    more = {key + "x" * key.endswith("."): 7 for key in WITHOUT_EFFECT}
    nothing = {"attention.causal": True, "attention.clamp_kqv": 0.0, "expert_group_count": 1,
               "attn_logit_softcapping": 0.0, "nextn_predict_layers": 0,
               "use_parallel_residual": True, "norm_top_k_prob": True,
               "ssm.v_head_reordered": True}  # fmt: skip
    for case in (("llama", "plain"), ("qwen3", "plain")):
        _write(tmp_path / "a.gguf", case)
        changes = [entry(key, value) for key, value in {**more, **nothing}.items()
                   if key not in READ or key.endswith("finetuned")]  # fmt: skip
        _write(tmp_path / "b.gguf", case, *changes)
        plain, other = (load_parts(tmp_path / name)[0].config for name in ("a.gguf", "b.gguf"))
        plain._name_or_path = other._name_or_path = ""
        assert plain.to_dict() == other.to_dict()


def _none(key: str) -> Callable[[Any], None]:
    return entry(key, None)


SCALED: list[tuple[str, list[Any]]] = [
    ("linear", [_none("rope.scaling.type")]),
    ("linear", [_none("rope.scaling.type"), _none("rope.scaling.factor"),
                entry("rope.scale_linear", 4.0)]),
    ("linear", [_none("rope.scaling.factor"), entry("rope.scale_linear", 4.0)]),
    ("plain", [entry("rope.scaling.type", "none"), entry("rope.scaling.factor", 4.0)]),
    ("plain", [entry("rope.scaling.original_context_length", 32),
               entry("rope.scaling.finetuned", True)]),
]  # fmt: skip


@pytest.mark.parametrize("case", SCALED)
def test_a_factor_without_a_type_is_linear(case: tuple[str, list[Any]], tmp_path: Path) -> None:
    """As in llama.cpp b11739; older files call it rope.scale_linear, and none leaves it aside."""
    variant, changes = case
    more = {}
    if variant == "linear":
        more = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}
    model = _write(tmp_path / "m.gguf", ("llama", variant, more), *changes)
    check_tokens(tmp_path / "m.gguf", model)


@pytest.mark.parametrize("case", [("falcon_h1", "multipliers"), ("lfm2_moe", "plain"),
                                  ("phi3", "plain"), ("gemma4_text", "all experts")])  # fmt: skip
def test_a_factor_that_a_model_does_not_take_is_refused(
    case: tuple[str, str], tmp_path: Path
) -> None:
    _write(tmp_path / "m.gguf", case, entry("rope.scaling.factor", 4.0))
    check_file_refused(
        tmp_path / "m.gguf", "has a rotary embedding of the type 'linear'; expected none"
    )


def test_yarn_without_a_length_takes_the_contexts(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0,
            "original_max_position_embeddings": 256}  # fmt: skip
    case = ("llama", "plain", {"rope_parameters": rope, "max_position_embeddings": 256})
    gone = _none("rope.scaling.original_context_length")
    check_tokens(tmp_path / "m.gguf", _write(tmp_path / "m.gguf", case, gone))


@pytest.mark.parametrize("key", ["attn_factor", "yarn_attn_factor", "yarn_ext_factor"])
@pytest.mark.parametrize("variant", ["plain", "linear", "yarn"])
def test_a_factor_of_scores_is_refused(variant: str, key: str, tmp_path: Path) -> None:
    """llama.cpp scales queries and keys by it, without yarn, too."""
    _write(tmp_path / "m.gguf", ("llama", variant), entry(f"rope.scaling.{key}", 1.5))
    check_file_refused(tmp_path / "m.gguf", f"has a rope.scaling.{key} other than 1; expected 1")


@pytest.mark.parametrize("pattern", [0, 1, 2, 3, 9, [True, False, False], [0, 1, 1]])
@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "gpt_oss", "olmo3"])
def test_layers_have_a_window_by_the_files_pattern(kind: str, pattern: Any, tmp_path: Path) -> None:
    """The last layer of a period has none, and without a period all have one."""
    slides = pattern if isinstance(pattern, list) else [
        pattern == 0 or (i + 1) % pattern != 0 for i in range(3)]  # fmt: skip
    kinds = [SLIDING if s else FULL for s in slides]
    more = {"num_hidden_layers": 3, "layer_types": kinds}
    model = _write(tmp_path / "m.gguf", (kind, "plain", more),
                   entry("attention.sliding_window_pattern", pattern))  # fmt: skip
    check_tokens(tmp_path / "m.gguf", model)
    assert load_parts(tmp_path / "m.gguf")[0].config.layer_types == kinds


def test_olmo_3_without_a_pattern_has_each_fourth_layer_without_a_window(tmp_path: Path) -> None:
    model = _write(tmp_path / "m.gguf", ("olmo3", "plain"),
                   _none("attention.sliding_window_pattern"))  # fmt: skip
    assert model.config.layer_types == [SLIDING, SLIDING, SLIDING, FULL]
    check_tokens(tmp_path / "m.gguf", model)


def _ollamas(*changes: Any) -> list[Any]:
    gone = [_none(key) for key in ("attention.scale", "rope.freq_base", "rope.freq_base_swa")]
    return [*gone, *changes]


def test_ollamas_gemma_3(tmp_path: Path) -> None:
    """Its names of bases, its defaults, and a bound of logits that Ollama does not apply."""
    rope = {kind: {"rope_type": "default", "rope_theta": theta}
            for kind, theta in ((FULL, 500.0), (SLIDING, 50.0))}  # fmt: skip
    sizes = {"num_hidden_layers": 6, "layer_types": None, "query_pre_attn_scalar": 12}
    bases = [entry("rope.global.freq_base", 500.0), entry("rope.local.freq_base", 50.0)]
    case = ("gemma3_text", "plain", {**sizes, "rope_parameters": rope})
    capped = entry("final_logit_softcapping", 0.3)
    model = _write(tmp_path / "m.gguf", case, *_ollamas(*bases, capped))
    assert model.config.final_logit_softcapping is None
    check_tokens(tmp_path / "m.gguf", model)


def test_ollamas_gemma_3_with_images(tmp_path: Path) -> None:
    """What reads images is left aside, and the file leaves out what Ollama knows."""
    rope = {FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip
    sizes = {"num_hidden_layers": 6, "layer_types": None, "query_pre_attn_scalar": 12,
             "max_position_embeddings": 131072, "rms_norm_eps": 1e-6}  # fmt: skip
    gone = ("attention.layer_norm_rms_epsilon", "rope.scaling.type", "rope.scaling.factor")
    images = [entry("vision.block_count", 2), entry("mm.tokens_per_image", 256)]
    tensors = {
        "v.blk.0.attn_q.weight": torch.ones(4, 4),
        "mm.mm_soft_emb_norm.weight": torch.ones(4),
    }
    case = ("gemma3_text", "plain", {**sizes, "rope_parameters": rope})
    changes = _ollamas(*map(_none, gone), *images)
    model = _write(tmp_path / "m.gguf", case, *changes, **tensors)
    check_tokens(tmp_path / "m.gguf", model)
    config = load_parts(tmp_path / "m.gguf")[0].config
    assert config.rope_parameters == model.config.rope_parameters
    assert config.rms_norm_eps == 1e-6
    _write(tmp_path / "m.gguf", ("gemma2", "plain"), v=torch.ones(4))
    check_file_refused(tmp_path / "m.gguf", "tensors that its architecture does not have, 'v' one")


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "llama"])
def test_no_space_before_a_text_of_ollamas_gemmas(kind: str, tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "a", "\u2581", "\u2581a"]

    def words(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0, 0.0, 0.0, -1.0, -2.0, -3.0])
        writer.add_token_types([2, 3, 3, 1, 1, 1])
        writer.add_bool("tokenizer.ggml.add_unknown_token", False)

    _write(tmp_path / "m.gguf", (kind, "plain"), words)
    expected = ["\u2581a"] if kind == "llama" else ["a"]
    assert load_tokenizer(tmp_path / "m.gguf").tokenize("a") == expected


JOINED: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "biases, tied, wide heads", {}),
    ("gemma3_text", "plain", {"num_hidden_layers": 7, "layer_types": None}),
    ("qwen2", "plain, group of 7", {}),
    ("qwen3_5_text", "plain", {"rms_norm_eps": 1e-5}),
    ("lfm2", "convolutions at the ends", {}),
    ("granitemoehybrid", "experts, multipliers", {}),
    ("gpt_oss", "plain", {}),
]


def _joined(model: Any) -> dict[str, Tensor]:
    """Return tensors with queries to values of a layer as one."""
    tensors = tensors_of(model)
    for name in list(tensors):
        if found := re.fullmatch(r"(blk\.\d+\.attn_)q\.(weight|bias)", name):
            parts = [tensors.pop(f"{found[1]}{part}.{found[2]}") for part in "qkv"]
            tensors[f"{found[1]}qkv.{found[2]}"] = torch.cat(parts)
    return tensors


def _write_tensors(path: Path, model: Any, tensors: dict[str, Tensor], **more: Any) -> None:
    write_model(path, model, without=tensors_of(model).keys() - tensors.keys(), **tensors, **more)


@pytest.mark.parametrize("case", JOINED, ids=lambda case: case[0])
def test_queries_to_values_as_one_tensor(case: tuple[str, str, Any], tmp_path: Path) -> None:
    """llama.cpp reads either, of all architectures that have them apart."""
    model = model_of(random_config(case[0], case[1], **case[2]))
    tensors = _joined(model)
    assert any(name.endswith("attn_qkv.weight") for name in tensors)
    _write_tensors(tmp_path / "m.gguf", model, tensors)
    check_tokens(tmp_path / "m.gguf", model)
    name = next(name for name in tensors if name.endswith("attn_qkv.weight"))
    tensors[name] = tensors[name][:, 1:].contiguous()
    _write_tensors(tmp_path / "m.gguf", model, tensors)
    check_file_refused(tmp_path / "m.gguf", f"has {name} of shape")


def test_queries_to_values_of_phi_3_as_three_tensors(tmp_path: Path) -> None:
    model = model_of(random_config("phi3", "plain"))
    heads, tensors = (model.config.num_attention_heads, model.config.num_key_value_heads), {}
    for name, tensor in tensors_of(model).items():
        if not name.endswith("attn_qkv.weight"):
            tensors[name] = tensor
            continue
        size = tensor.shape[0] // (heads[0] + 2 * heads[1])
        parts = tensor.split([heads[0] * size, heads[1] * size, heads[1] * size])
        tensors |= {name.replace("qkv", kind): part.contiguous()
                    for kind, part in zip("qkv", parts, strict=True)}  # fmt: skip
    _write_tensors(tmp_path / "m.gguf", model, tensors)
    check_tokens(tmp_path / "m.gguf", model)


def test_joined_blocks_stay_blocks(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    model = model_of(random_config("llama", "plain", **sizes))
    write_model(tmp_path / "a.gguf", model, kinds=lambda name: "Q8_0")
    _write_tensors(tmp_path / "b.gguf", model, _joined(model), kinds=lambda name: "Q8_0")
    apart, joined = (load_parts(tmp_path / name, keeps_blocks=True)[2].layers[0].qkv
                     for name in ("a.gguf", "b.gguf"))  # fmt: skip
    assert isinstance(joined, QuantizedWeight) and joined.kind == "Q8_0"
    assert torch.equal(joined.data, apart.data)
