"""Tiny random models of transformers, and CTranslate2's own conversion of them."""

import copy
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GemmaConfig, OPTConfig, PreTrainedTokenizerFast

from lmdecode.formats.ctranslate2 import ModelFile
from tests.decoder.decoder_models import make_model
from tests.readers.ctranslate2.model_files import model_file
from tests.support.causal_models import SIZES, model_of, random_config
from tests.support.tiny_models import noisy_norms, seeded_model

pytest.importorskip("ctranslate2")
tokenizers = pytest.importorskip("tokenizers")

SEQ2SEQ = ("bart", "m2m_100", "marian", "mbart", "mt5", "pegasus", "t5", "t5_gated", "umt5")
# Of transformers' architectures, what CTranslate2's converters keep of them.
CAUSAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "plain", {}),
    "llama, tied": ("llama", "plain", {"tie_word_embeddings": True}),
    "llama, linear": ("llama", "linear", {}),
    "mistral": ("mistral", "no window, group of 4", {"head_dim": 8}),
    "mistral, window": ("mistral", "window", {}),
    "qwen2": ("qwen2", "plain, group of 7", {}),
    "qwen3": ("qwen3", "plain", {}),
    "gemma": (
        "gemma", "plain", {"head_dim": 12, "hidden_activation": "gelu_pytorch_tanh"},
    ),
    "gemma2": (
        "gemma2", "no caps, biases, untied",
        {
            "attention_bias": False, "query_pre_attn_scalar": 12, "sliding_window": 4096,
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
    "gemma3": (
        "gemma3_text", "plain",
        {
            "query_pre_attn_scalar": 12, "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            },
        },
    ),
    "gpt2": ("gpt2", "plain", {"layer_norm_epsilon": 1e-5}),
}  # fmt: skip
QUANTIZATIONS = ("float32", "float16", "bfloat16", "int8", "int8_float32", "int8_float16",
                 "int8_bfloat16", "int16")  # fmt: skip
WHISPER_VOCAB = 51_865
_NORMS_FIRST = {"bart": False, "mbart": True, "pegasus": True}


def tokenizer_of(words: list[str], **special: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of these words; each is a token."""
    level = tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(level)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def words_of(model: Any) -> list[str]:
    """Return a word for each token of a model, with its special tokens in their places."""
    config = model.config
    words = [f"w{i}" for i in range(config.vocab_size)]
    words[3] = "<unk>"
    for name, token in (
        ("<s>", "bos_token_id"), ("</s>", "eos_token_id"), ("<pad>", "pad_token_id"),
    ):  # fmt: skip
        if getattr(config, token, None) is not None:
            words[getattr(config, token)] = name
    return words


def _marian() -> Any:
    """Return a Marian whose last token is its padding: an embedding of zeros, never found."""
    last = 63
    model = make_model("marian")
    own = {"pad_token_id": last, "decoder_start_token_id": last}
    model = seeded_model("MarianMTModel", **{**model.config.to_dict(), **own})
    model.load_state_dict(make_model("marian").state_dict())
    with torch.no_grad():
        model.get_input_embeddings().weight[last] = 0
        model.final_logits_bias[0, last] = 0
    generation = model.generation_config
    generation.bad_words_ids, generation.max_length = [[last]], None
    return model


def whisper(mels: int = 80) -> Any:
    """Return a multilingual Whisper of the real ones' vocabulary."""
    model = seeded_model(
        "WhisperForConditionalGeneration", 3,
        vocab_size=WHISPER_VOCAB, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=2, encoder_ffn_dim=48,
        decoder_ffn_dim=40, max_source_positions=100, max_target_positions=60, num_mel_bins=mels,
        init_std=0.4, pad_token_id=50257, bos_token_id=50257, eos_token_id=50257,
        decoder_start_token_id=50258, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    noisy_norms(model)
    words = whisper_words()
    generation = model.generation_config
    generation.suppress_tokens, generation.begin_suppress_tokens = [1, 2, 50258], [220, 50257]
    generation.alignment_heads = [[0, 1], [1, 0]]
    generation.is_multilingual, generation.no_timestamps_token_id = True, 50363
    generation.lang_to_id = {words[i]: i for i in range(50259, 50358)}
    generation.task_to_id = {"transcribe": 50359, "translate": 50358}
    generation.prev_sot_token_id, generation.max_initial_timestamp_index = 50361, 50
    generation.max_length = 60
    generation._from_model_config = False  # else its languages are not read from its file
    return model


def whisper_words() -> list[str]:
    """Return Whisper's tokens, but for those of text, which are made up."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    words = [f"w{i}" for i in range(50257)]
    words[3] = "<unk>"
    names = ["endoftext", "startoftranscript", *list(LANGUAGES)[:99], "translate", "transcribe",
             "startoflm", "startofprev", "nospeech", "notimestamps"]  # fmt: skip
    words += [f"<|{name}|>" for name in names]
    return words + [f"<|{i * 0.02:.2f}|>" for i in range(WHISPER_VOCAB - len(words))]


def _opt() -> Any:
    config = OPTConfig(
        vocab_size=104, hidden_size=32, num_hidden_layers=2, ffn_dim=48, num_attention_heads=4,
        max_position_embeddings=80, word_embed_proj_dim=32, init_std=0.4,
        bos_token_id=0,
    )  # fmt: skip
    return model_of(config)


@functools.cache
def original(kind: str) -> Any:
    """Return the model of transformers; tests share it."""
    if kind == "whisper":
        return whisper()
    if kind == "marian":
        return _marian()
    if kind == "opt":
        return _opt()
    if kind not in CAUSAL:
        return make_model(kind)
    architecture, variant, more = CAUSAL[kind]
    if kind == "gemma":  # which Decoding knows from these files alone
        config = GemmaConfig(**SIZES, **more)
    else:
        config = random_config(architecture, variant, **more)
    config.attn_implementation = "eager"
    return model_of(config)


@functools.cache
def _saved(kind: str, root: Path) -> Path:
    model, folder = original(kind), root / kind
    words = whisper_words()[:50364] if kind == "whisper" else words_of(model)
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    special = {name: token for name, token in special.items() if token in words}
    if kind == "whisper":
        special = dict.fromkeys(special, "<|endoftext|>")
    model.save_pretrained(folder)
    if kind in _NORMS_FIRST:  # what older versions of transformers wrote
        path = folder / "config.json"
        settings = {"normalize_before": _NORMS_FIRST[kind]}
        settings["normalize_embedding"] = kind != "pegasus"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    tokenizer_of(words, **special).save_pretrained(folder)
    return folder


def rewritten(
    folder: Path, new: Path, change: Callable[[dict[str, torch.Tensor], dict[str, str]], None]
) -> Path:
    """Copy a folder whose variables and aliases are changed; return the copy."""
    shutil.copytree(folder, new)
    file = ModelFile(folder / "model.bin")
    variables = {name: file.read(name) for name in file.variables}
    aliases = dict(file.aliases)
    change(variables, aliases)
    (new / "model.bin").write_bytes(model_file(variables, aliases, spec=file.spec))
    return new


@functools.cache
def _read(folder: Path) -> Any:
    """Return what CTranslate2's converter reads of a model: the same for each quantization."""
    from ctranslate2.converters import TransformersConverter

    return TransformersConverter(str(folder))._load()


def converted(kind: str, root: Path, quantization: str = "float32") -> Path:
    """Return the folder that CTranslate2's converter made of a model, below ``root``."""
    return _converted(kind, root, quantization)


@functools.cache
def _converted(kind: str, root: Path, quantization: str) -> Path:
    from ctranslate2.converters import TransformersConverter

    class Converter(TransformersConverter):
        def _load(self) -> Any:
            return copy.deepcopy(_read(_saved(kind, root)))

    folder = root / f"{kind} {quantization}"
    Converter(str(_saved(kind, root))).convert(str(folder), quantization=quantization)
    return folder
