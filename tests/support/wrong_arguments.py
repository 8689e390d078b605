"""Wrong calls of an op, made from a right one: each argument is wrong in every way of its type."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmdecode import BeamParameters, BeamState
from lmdecode.beam.token_rules import TokenRules
from lmdecode.decoder.state import DecodingCaches
from tests.support.contracts import Call

_DTYPES = ("bool", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
           "complex64")  # fmt: skip


_RANGE = r" is -?\d+; expected (?:(-?\d+) to (-?\d+)|at least (\d+))\b(?![.^])"
_BEAMS = {
    "state": [f"state.{field}" for field in BeamState._fields],
    "parameters": [f"parameters.{field}" for field in BeamParameters._fields],
    "rules": [*(f"token_rules.{field}" for field in TokenRules._fields),
              "token_rules.trie_numbers", "trie_tokens", "child_begin"],
    "trace": [f"trace.{field}"
              for field in ("scores", "log_probs", "tokens", "beams", "decisions", "status")],
}  # fmt: skip
_DECODING = {"caches": [f"caches.{field}" for field in DecodingCaches._fields]}
_CAUSAL = {
    "caches": ["caches.pool", "caches.blocks", "caches.lengths", "caches.ref_counts",
               "caches.free_blocks", "caches.counters"],
}  # fmt: skip
#: Names in errors of arguments that have another name there, and of the tensors of lists.
PARTS: dict[str, dict[str, list[str]]] = {
    "beam_search_step_": _BEAMS,
    "decoding_steps_": {**_BEAMS, **_DECODING},
    **dict.fromkeys(
        ("decoding_read_memory_", "faster_transformer_decoding_", "decoder_layer"), _DECODING
    ),
    **dict.fromkeys(
        ("causal_forward_", "causal_steps_", "causal_caches_reorder_", "causal_caches_truncate_",
         "causal_caches_start_"),
        _CAUSAL,
    ),
    "sampler_copy_": {"from_state": ["from"]},
}  # fmt: skip
#: What ops take beside the types of their contracts' calls, and arguments that have a range.
TAKES: dict[str, tuple[str, str]] = {
    "sliding_window_attention": (
        "q: 2-? 2+?; v: 2-? 2+? 3- 3+; sinks: float16 bfloat16 float64; alibi_slopes: rank- "
        "float16 bfloat16 float64; q_positions: rank- int32; kv_lengths: int32; cu_seqlens_q: "
        "int32; cu_seqlens_kv: int32; attn_mask: rank- 0+ float16 bfloat16 float32; block_table: "
        "1- 1+; indirection: 1- 1+; return_lse: bytes str None 1",
        "window< window_right< softcap< kv_lengths cu_seqlens_q cu_seqlens_kv"),
    "sliding_window_decode": (
        "q: 2-? 2+?; v: 3- 3+; sinks: float16 bfloat16 float64; alibi_slopes: rank- float16 "
        "bfloat16 float64; q_positions: rank- int32; kv_lengths: int32; block_table: 1- 1+; "
        "indirection: 1- 1+; return_lse: bytes str None 1",
        "window< window_right< softcap< kv_lengths"),
    "merge_attention_states": ("", ""),
    "log_softmax_top_k": ("logits: 1- 1+ float16 bfloat16 float32; num_beams: int32",
        "num_candidates< num_beams repetition_penalty< no_repeat_ngram_size< min_lengths< "
        "diversity_penalty<"),
    "log_softmax_top_k.processed": (
        "logits: 1-? 1+? float16 bfloat16 float32; sequences: 1- 1+; end_tokens: 0- 0+; "
        "suppressed_tokens: rank- 1- 1+; diversity_tokens: 1- 1+; bias: rank-",
        "num_candidates< num_beams< lengths repetition_penalty< no_repeat_ngram_size<? "
        "min_lengths<? diversity_penalty<?"),
    "log_softmax_top_k.trie": (
        "logits: 1-? 1+? float16 bfloat16; sequences: 1- 1+; end_tokens: 0- 0+; "
        "suppressed_tokens: rank- 1- 1+; diversity_tokens: 1- 1+; bias: rank-",
        "num_candidates< num_beams< lengths repetition_penalty< no_repeat_ngram_size<? "
        "min_lengths<? diversity_penalty<?"),
    "beam_step": ("parameters.end_tokens: 1- 1+; parent_offsets: 0+; sequences: 2- 2+",
        "state.lengths? parameters.num_beams? parameters.num_hypotheses? "
        "parameters.prompt_lengths? parameters.max_lengths<? parameters.early_stopping? beams "
        "slots row_offsets parent_offsets< rows<"),
    "beam_finalize": ("parameters.end_tokens: 1- 1+; sequences: 2- 2+",
        "state.lengths? parameters.num_beams parameters.num_hypotheses parameters.prompt_lengths "
        "parameters.max_lengths< parameters.early_stopping num_return_sequences< num_groups< "
        "slots"),
    "beam_search_step_": ("logits: 1- 1+ float16 bfloat16; parameters.end_tokens: 1- 1+; "
        "token_rules.no_repeat_ngram_size: rank+", "token_rules.trie_numbers searches"),
    "trie_build": ("", "tokens< offsets"),
    "trie_step": ("", ""),
    "decoding_steps_": (
        "weights: 0+; parameters.end_tokens: 1+; token_rules.forced: 1+; workspace: rank+ 0+",
        "state.lengths< parameters.num_beams parameters.num_hypotheses parameters.prompt_lengths "
        "parameters.max_lengths parameters.early_stopping parameters.pad_tokens "
        "caches.memory_lengths caches.cached_lengths"),
    "decoding_read_memory_": ("weights: 0+; memory: 1+", "lengths requests"),
    "faster_transformer_decoding_": ("weights: 0+", "caches.memory_lengths"),
    "decoder_layer": ("weights: 0+; relative_bias: rank+",
        "caches.memory_lengths cache_rows positions requests"),
    "encoder_forward": ("weights: 0+", "tokens positions row_begins"),
    "gather_tree": ("", ""),
    "dynamic_time_warping": ("cost: 0- 0+ 1- 1+ meta", ""),
    "causal_forward_": (
        "weights: 0+; caches.pool: 0+ 4+ bfloat16; caches.blocks: 1-?; workspace: rank+ 0+",
        "caches.lengths caches.free_blocks? tokens entries"),
    "causal_steps_": (
        "weights: 0+; caches.pool: 0+ 4+ bfloat16; workspace: rank+ 0+; ends: 1+; chosen: 0- 0+",
        "caches.lengths tokens entries"),
    "causal_caches_reorder_": ("caches.pool: 0- 0+ 2+ 4+ 5+ bfloat16", "caches.lengths parents"),
    "causal_caches_truncate_": ("caches.pool: 0- 0+ 2+ 4+ 5+ bfloat16; lengths: 0- 0+",
        "caches.lengths lengths"),
    "causal_caches_start_": ("caches.pool: 0- 0+ 2+ 4+ 5+ bfloat16; lengths: 0-",
        "caches.lengths lengths"),
    "reorder_cache_": (
        "tensors[0]: 0+? 1-? 1+? 2- 2+ 3- 3+ dtypes; tensors[1]: 1- 1+ 2- 2+ 3- 3+ dtypes; "
        "parents: int32 int64", "parents batch_dim<? length_dim<? length<"),
    "update_beam_indirection_": ("indirection: 1-? 1+; parents: int32; length: int64",
        "parents length"),
    "ring_cache_append_": ("position: int64", "position< num_sink_tokens<"),
    "copy_blocks_": (
        "pools[0]: 0+ 1- 1+ 2+ 3- 3+ dtypes; pools[1]: 0+ 1- 1+ 2+ 3- 3+ dtypes; copies: 0-",
        "copies"),
    "block_table_append_": ("block_table: 1+; num_tokens: int32", "lengths num_tokens"),
    "block_table_reorder_": ("block_table: 1- 1+; parents: 0- 0+ int32", "parents"),
    "pack_linear": ("weight: 0- 0+ 1- 1+ meta", ""),
    "repack_linear": ("packed: meta", ""),
    "pack_quantized_linear": ("scales: 1-?", ""),
    "pack_gguf_linear": ("blocks: 0- 0+ meta", ""),
    "dequantize_gguf": ("blocks: 0- 0+ meta", ""),
    "packed_linear": ("x: rank+? rank-? 0-? 0+?", ""),
    "packed_linear_rows": ("x: rank+ rank- 0- 0+ 1- 1+", ""),
    "unpack_linear": ("packed: meta", ""),
    "batched_matmul": ("a: 1- 1+; b: 2- 2+", ""),
    "layer_norm": ("x: rank+ rank- 0- 0+ 1-? 1+? meta?", "eps<"),
    "rms_norm": ("x: rank+ rank- 0- 0+", "eps<"),
    "top_k_top_p_sample": (
        "logits: 0-? 0+? 1-? 1+? float16 bfloat16 meta? float32; top_k: rank- int32 int64; top_p:"
        " rank- float16 bfloat16 float64 float32; min_p: rank- float16 bfloat16 float64; "
        "temperature: rank- float16 bfloat16 float64 float32; seed: rank- int32; position: rank- "
        "int32", "temperature< seed<? eps<"),
    "prompt_lookup": ("tokens: 1+ int32; lengths: int32", "lengths num_tokens< max_ngram<"),
    "sampler_insert_": ("state: 0- 0+; prompt: 0- 0+", ""),
    "sampler_accept_": ("state: 0- 0+; tokens: 0- 0+", "tokens"),
    "sampler_rewind_": ("state: 0- 0+ meta", ""),
    "sampler_copy_": ("", ""),
    "sampler_step_": ("logits: float16 bfloat16", ""),
    "sampler_verify_": ("logits: float16 bfloat16", ""),
}  # fmt: skip


class Wrong(NamedTuple):
    """A call with one wrong argument: its name, the way, and a pattern of the error's message."""

    argument: str
    way: str
    call: Call
    pattern: str
    with_number: Callable[[int], Call]  # the same way with another number

    def nearest(self, message: str) -> tuple[int, Call] | None:
        """Return the nearest number out of the range that an error tells, and a call with it."""
        found = re.search(_RANGE, message)
        if not found or self.way not in ("below", "above"):
            return None
        end = (found[1] or found[3]) if self.way == "below" else found[2]
        if end is None or abs(int(end)) >= (1 << 31) - 1:
            return None
        number = int(end) + (1 if self.way == "above" else -1)
        return number, self.with_number(number)


Ways = Mapping[str, Mapping[str, set[bool]]]


def taken(ways: Ways) -> str:
    """Return the ways that arguments are taken in, "?" behind what some of the calls refuse."""
    found = []
    for argument, of_it in ways.items():
        taken = [way + "?" * (False in took) for way, took in of_it.items() if True in took]
        taken = [way for way in taken if way.strip("?") not in ("steps", "below", "above")]
        if sum(way in _DTYPES for way in taken) == len(_DTYPES) - 1:
            taken = [way for way in taken if way not in _DTYPES] + ["dtypes"]
        found += [f"{argument}: {' '.join(taken)}"] if taken else []
    return "; ".join(found)


def ranges(ways: Ways) -> str:
    """Return arguments with numbers out of range: "<", ">" for one end, "?" for some alone."""
    found = []
    for argument, of_it in ways.items():
        below, above = (of_it.get(way, set()) for way in ("below", "above"))
        if False in below | above:
            end = "" if False in below & above else "<" if False in below else ">"
            found.append(argument + end + "?" * (True in (below if False in below else above)))
    return " ".join(found)


def is_op(function: Callable[..., Any]) -> bool:
    """Whether a function is an op itself: the dispatcher checks its numbers, in torch's words."""
    return isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))


def wrong_calls_of(call: Call, parts: Mapping[str, Sequence[str]]) -> Iterator[Wrong]:
    """Yield the call with each of its arguments wrong; ``parts`` are names in errors."""
    if is_op(call.function):
        schema = getattr(call.function, "default", call.function)._schema
        types = {argument.name: "" for argument in schema.arguments}
    else:
        parameters = inspect.signature(call.function).parameters.values()
        types = {parameter.name: parameter.annotation for parameter in parameters}
    names = list(types)
    keys = {names[key] if isinstance(key, int) else key: key for key in call.arguments}
    for name, key in keys.items():
        value = call.arguments[key]
        if isinstance(value, Tensor):
            said = parts.get(name, [name])[0]
            put = functools.partial(_changed, call, key)
            yield from _wrong_tensors(said, value, put)
        elif isinstance(value, (list, tuple)):
            fields = [f"{name}.{field}" for field in getattr(value, "_fields", ())]
            fields = fields or parts.get(name, [f"{name}[{i}]" for i in range(len(value))])
            for i, part in enumerate(value):
                put = functools.partial(_changed, call, key, place=i)
                yield from _wrong_tensors(fields[i % len(fields)], part, put)
    for name, annotation in types.items():
        put = functools.partial(_changed, call, keys.get(name, name))
        for way, wrong in _wrong_values(annotation):
            came = f"{wrong}|{wrong!r}|{float(wrong)}" if way == "below" else repr(wrong)
            pattern = rf"\b{name}(\[0\])? is (of type {type(wrong).__name__}|{came}|too large); exp"
            if name not in keys:
                pattern += rf"|\b{name}\b.*; exp|; exp.*\b{name}\b"
            yield Wrong(name, way, put(wrong), pattern, put)


def _changed(call: Call, key: int | str, value: Any, place: int | None = None) -> Call:
    if place is not None:
        whole = call.arguments[key]
        others = [*whole[:place], value, *whole[place + 1 :]]
        value = type(whole)(*others) if hasattr(whole, "_fields") else others
    changed = Call(call.function)
    changed.arguments = {**call.arguments, key: value}
    return changed.copy()


def _wrong_tensors(name: str, x: Any, put: Callable[[Any], Call]) -> Iterator[Wrong]:
    if not isinstance(x, Tensor):
        return

    def with_number(number: int) -> Call:
        wrong = x.clone()
        wrong.view(-1)[-1:] = number
        return put(wrong)

    def found(way: str, wrong: Tensor, pattern: str) -> Wrong:
        return Wrong(name, way, put(wrong), pattern, with_number)

    shapes = {"rank+": x[None]}
    if x.dim():
        shapes["rank-"] = x[0] if len(x) else x.new_empty(())
    for dim in range(x.dim()):
        if x.shape[dim]:
            shapes[f"{dim}-"] = x.narrow(dim, 0, x.shape[dim] - 1)
            shapes[f"{dim}+"] = torch.cat((x, x.narrow(dim, 0, 1)), dim)
    for way, wrong in shapes.items():  # or another argument does not fit to it
        came = re.escape(str(list(wrong.shape)))
        other = rf"{re.escape(name)} has shape (?!{came})(?!.*, as the first cache has)"
        yield found(way, wrong, rf"^(?!.*\b{other}).*; expected ")
    said = re.escape(name)
    for word in _DTYPES:
        dtype = getattr(torch, word)
        if dtype != x.dtype and x.numel():
            pattern = rf"\b{said} has dtype {word}; expected |; expected {word}$"
            yield found(word, x.to(dtype), rf"{pattern}|has another dtype than .*; expected the s")
    if x.dim() and x.numel() > 1:
        yield found("steps", torch.stack((x, x), -1)[..., 0], rf"\b{said} .*; expected ")
    elsewhere = "is on meta; expected |; expected (the device of .*, )?meta"
    yield found("meta", x.to("meta"), elsewhere)
    if x.dtype in (torch.int32, torch.int64):
        for way, number in (("below", -2), ("above", 1 << 30)):
            yield Wrong(name, way, with_number(number), "; expected ", with_number)


def _wrong_values(annotation: str) -> Iterator[tuple[str, Any]]:
    kinds = set(re.findall(r"\w+", annotation))
    if kinds:
        yield "bytes", b"x"
        yield "str", "x"
    if kinds and "None" not in kinds:
        yield "None", None
    if "Tensor" in kinds and "Sequence" not in kinds:
        yield "list", [1.0]
    if kinds & {"int", "float"}:
        yield "True", True
        yield "huge", 1 << 64 if "int" in kinds else 10**400
        yield "below", -2
        yield "nan" if "float" in kinds else "1.5", math.nan if "float" in kinds else 1.5
    if "bool" in kinds:
        yield "1", 1
