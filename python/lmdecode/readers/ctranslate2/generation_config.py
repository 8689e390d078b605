"""Entries of transformers' generation config, from ``config.json`` and the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["END", "check_settings", "generation_of", "whisper_generation_of"]

# Defaults of translate_batch: max_decoding_length, min_decoding_length and beam_size; and of
# generate_batch: max_length. They do not count the first token, max_length and min_length do.
_MOST_TRANSLATED, _LEAST_TRANSLATED, _BEAMS, _MOST_GENERATED = 256, 1, 2, 512
# Entries of config.json; quantization_* are refused. Two have no effect: unk_token replaces
# tokens that are no ids, and the shapes of weights tell multi_query_attention.
SETTINGS = frozenset(
    "add_source_bos add_source_eos alignment_heads bos_token decoder_start_token eos_token "
    "lang_ids layer_norm_epsilon multi_query_attention suppress_ids suppress_ids_begin "
    "unk_token".split()
)
# Vocabularies of this size have languages: CTranslate2's rule.
_MULTILINGUAL = 51_865
END, _START = "<|endoftext|>", "<|startoftranscript|>"
_NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")


def _token(folder: Path, settings: dict[str, Any], name: str, ids: dict[str, int]) -> int | None:
    """Return the id of a token that ``config.json`` names; None if it names none."""
    token = settings.get(name)
    if token is None or token == "":
        return None
    if not isinstance(token, str):
        raise ValueError(f"{folder / 'config.json'} has {token!r} for {name}; expected a token")
    return ids.get(token)


def check_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Raise ValueError for an entry of ``config.json`` that may change the model."""
    if settings.get("quantization_type"):
        raise ValueError(f"{folder} has weights of AWQ; expected floats, int8 or int16")
    if "model_type" in settings:  # of transformers, whose entries some have in the same file
        return
    for name, value in settings.items():
        # Other weights have null or 0 in these entries.
        if name not in SETTINGS and (value or not name.startswith("quantization_")):
            raise ValueError(
                f"{folder / 'config.json'} has {str(value)[:80]!r} for {name}; expected entries "
                f"among {', '.join(sorted(SETTINGS))}"
            )


def _around_sources(
    folder: Path, settings: dict[str, Any], sources: Sequence[str]
) -> dict[str, list[int]]:
    """Return the tokens that CTranslate2 puts before and after each source."""
    around = {}
    for place, name in (("before", "bos"), ("behind", "eos")):
        is_added, token = settings.get(f"add_source_{name}", False), settings[f"{name}_token"]
        if not isinstance(is_added, bool) or (is_added and token not in sources):
            raise ValueError(
                f"{folder / 'config.json'} has {is_added!r} for add_source_{name}; expected true "
                f"or false, and {token!r} in the source vocabulary"
            )
        around[place] = [sources.index(token)] if is_added else []
    return around


def generation_of(
    folder: Path,
    settings: dict[str, Any],
    vocabulary: Sequence[str],
    sources: Sequence[str],
    config: dict[str, Any],
) -> dict[str, Any]:
    """Return the generation config of a model other than Whisper; add its tokens to the config.

    ``settings`` are the entries of ``config.json``, ``vocabulary`` and ``sources`` tokens of the
    target and the source. The entry ``ctranslate2`` of ``config`` gets the tokens around sources,
    and the defaults that ``generate()`` has otherwise.
    """
    ids = {token: i for i, token in enumerate(vocabulary)}
    settings = {"bos_token": "<s>", "eos_token": "</s>", **settings}
    begin, end = (_token(folder, settings, name, ids) for name in ("bos_token", "eos_token"))
    padding = ids.get("<pad>", ids.get("<blank>", end))
    tokens = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": padding}
    is_seq2seq = "encoder_layers" in config or "num_decoder_layers" in config
    if is_seq2seq:
        settings = {"decoder_start_token": settings["bos_token"], **settings}
        start = _token(folder, settings, "decoder_start_token", ids)
        if config["model_type"] == "marian":
            rows = config["decoder_vocab_size"]
            if rows > len(vocabulary):  # the token with an embedding of zeros, after all others
                start = tokens["pad_token_id"] = rows - 1
        tokens["decoder_start_token_id"] = start
    config |= tokens
    most = _MOST_TRANSLATED if is_seq2seq else _MOST_GENERATED
    positions = config.get("max_position_embeddings", config.get("n_positions", most))
    longest = {"max_length": min(most, positions) + 1}
    if not is_seq2seq:
        config["ctranslate2"] = {"defaults": {"renormalize_logits": True, **longest}}
        return dict(tokens)
    defaults = {"min_length": _LEAST_TRANSLATED + 1, "num_beams": _BEAMS}
    config["ctranslate2"] = {
        **_around_sources(folder, settings, sources),
        "defaults": {"renormalize_logits": True, **defaults},
    }
    return {**tokens, **longest}


def _integers(folder: Path, settings: dict[str, Any], name: str, size: int) -> list[int] | None:
    """Return a list of tokens, or None."""
    found = settings.get(name)
    if found is None or found == []:
        return None
    is_fine = isinstance(found, list) and all(type(i) is int and -1 <= i < size for i in found)
    if not is_fine:
        raise ValueError(
            f"{folder / 'config.json'} has {str(found)[:80]} for {name}; expected a list of tokens "
            f"below {size}"
        )
    return [i for i in found if i >= 0]  # OpenAI's -1 stands for a list of its own


def _heads(folder: Path, settings: dict[str, Any], config: dict[str, Any]) -> list[list[int]]:
    """Return the attention heads for word timestamps; by default those of the later layers."""
    layers, heads = config["decoder_layers"], config["decoder_attention_heads"]
    found = settings.get("alignment_heads")
    if found is None:
        return [[i, j] for i in range(layers // 2, layers) for j in range(heads)]
    pairs = [
        pair if isinstance(pair, list) and [type(i) for i in pair] == [int, int] else [-1, -1]
        for pair in (found if isinstance(found, list) else [None])
    ]
    if not all(0 <= i < layers and 0 <= j < heads for i, j in pairs):
        raise ValueError(
            f"{folder / 'config.json'} has {str(found)[:80]} for alignment_heads; expected pairs "
            f"of a layer below {layers} and a head below {heads}"
        )
    return pairs


def whisper_generation_of(
    folder: Path, settings: dict[str, Any], vocabulary: Sequence[str], config: dict[str, Any]
) -> dict[str, Any]:
    """Return the generation config of a Whisper, as OpenAI's folders for transformers have it.

    Raises ValueError if ``config.json`` is damaged, or the vocabulary lacks Whisper's tokens.
    """
    ids = {token: i for i, token in enumerate(vocabulary)}
    size = config["vocab_size"]
    missing = [name for name in (END, _START, "<|notimestamps|>") if name not in ids]
    if missing:
        raise ValueError(f"{folder} has a vocabulary without {missing[0]!r}; expected Whisper's")
    end, start = ids[END], ids[_START]
    tokens = {
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "decoder_start_token_id": start,
    }
    config |= tokens
    is_multilingual = size >= _MULTILINGUAL
    begin = _integers(folder, settings, "suppress_ids_begin", size)
    generation: dict[str, Any] = {
        **tokens,
        "alignment_heads": _heads(folder, settings, config),
        "begin_suppress_tokens": begin,
        "suppress_tokens": _integers(folder, settings, "suppress_ids", size),
        "is_multilingual": is_multilingual,
        "max_initial_timestamp_index": 50,
        "max_length": config["max_target_positions"],
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids.get("<|startofprev|>"),
        "return_timestamps": False,
    }
    if is_multilingual:
        languages = _integers(folder, settings, "lang_ids", size)
        if languages is None:  # they stand between the start and the tasks
            languages = list(range(start + 1, ids.get("<|translate|>", start + 1)))
        generation["lang_to_id"] = {vocabulary[i]: i for i in languages if i < len(vocabulary)}
        generation["task_to_id"] = {
            task: ids[f"<|{task}|>"] for task in ("transcribe", "translate") if f"<|{task}|>" in ids
        }
    return generation
