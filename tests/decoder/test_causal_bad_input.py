"""The ops of decoder-only models: what does not fit is refused by its name, before any change."""

import re
import struct
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lmdecode.decoder.causal_caches import CausalCaches
from lmdecode.models.record import read_record, record_bytes
from tests.decoder.causal_steps import Entry, forward_arguments, new_caches, packed, state, step
from tests.support.causal_models import VOCAB, WINDOW, random_tokens
from tests.support.op_contract import assert_op_refuses
from tests.support.records import with_entries

ops = torch.ops.lmdecode

(WEIGHTS, CACHES, WINDOWS, WORKSPACE, TOKENS, ENTRIES, NUM_LOGITS, VOCAB_SIZE,
 MAX_ROWS) = range(9)  # fmt: skip
POOL, BLOCKS, LENGTHS, REF_COUNTS, FREE_BLOCKS, COUNTERS = range(6)


def running(architecture: str = "gemma3_text", weight_format: str = "float32") -> CausalCaches:
    """Two caches, the second with a window, and three sequences of 70, 5 and 0 positions."""
    variant = {"gpt2": "odd heads, no scale", "mistral": "window"}.get(architecture, "plain")
    model = packed(architecture, variant, weight_format)
    caches = new_caches(model, 3, 96, max_rows=16)
    step(caches, Entry(0, random_tokens(70)), Entry(1, random_tokens(5)))
    return caches


def arguments_of(caches: CausalCaches) -> list[Any]:
    """Return those of a step that fits: a generated token, and a prompt."""
    entries = (Entry(0, random_tokens(1), False), Entry(2, random_tokens(7), num_logits=2))
    return forward_arguments(caches, *entries)


def check_refused(op: Any, arguments: list[Any], message: str) -> None:
    """A ValueError of the op that says so, and no tensor is another one afterwards."""
    assert_op_refuses(op, (f"^{op.__name__}: (?:{message})", {}, ValueError), *arguments)


def test_what_fits() -> None:
    caches = running()
    before = state(caches)
    logits = ops.causal_forward_(*arguments_of(caches))
    assert logits.shape == (3, VOCAB) and logits.isfinite().all()
    assert not all(map(torch.equal, before, state(caches)))


def at_odd_address(tensor: Tensor) -> Tensor:
    """Return a copy that is not aligned to 64 bytes."""
    memory = torch.empty(tensor.numel() + 64, dtype=torch.uint8)
    begin = -memory.data_ptr() % 64 + 8
    begin -= 64 if begin >= 64 else 0
    return memory[begin : begin + tensor.numel()].copy_(tensor)


def strided(tensor: Tensor) -> Tensor:
    """Return a copy with gaps between the elements of its last dimension."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


Change = Callable[[Any], Any]


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (WEIGHTS, lambda w: w[:-64], "weights has .* bytes; expected .*, as its record says"),
        (WEIGHTS, lambda w: w[64:], "weights has no record in its"),
        (WEIGHTS, lambda w: w[:8], "weights has no record in its 8 bytes"),
        (WINDOWS, lambda w: [], "windows has 0 entries; expected 1 to 2"),
        (WINDOWS, lambda w: [*w, 1], "windows has 3 entries; expected 1 to 2"),
        (WINDOWS, lambda w: [w[0], -1], r"windows\[1\] is -1; expected 0 to"),
        (WINDOWS, lambda w: w[:1], "caches has 12 tensors; expected 6"),
        (WINDOWS, lambda w: [w[0], WINDOW - 1], r"layers.0 has layer 0 of cache 1; expected"),
        (WORKSPACE, lambda w: w[:-1], "workspace has .* bytes on cpu; expected at least"),
        (WORKSPACE, at_odd_address, "workspace has .* aligned to 64"),
        (WORKSPACE, strided, "workspace has .* bytes"),
        (TOKENS, lambda t: t[:-1], "tokens has 7 entries; expected 8, as entries say"),
        (TOKENS, lambda t: torch.cat((t, t[:1])), "tokens has 9 entries; expected 8"),
        (NUM_LOGITS, lambda n: n + 1, "num_logits is 4; expected 3, as entries say"),
        (NUM_LOGITS, lambda n: -1, "num_logits is -1; expected 3"),
        (VOCAB_SIZE, lambda n: n + 1, "vocab_size is 102; expected 101, from config"),
        (MAX_ROWS, lambda n: 0, r"max_rows is 0; expected 1 to 2\^20"),
        (MAX_ROWS, lambda n: (1 << 20) + 1, "max_rows is 1048577"),
        (MAX_ROWS, lambda n: n + 1, "workspace has .* bytes on cpu; expected at least"),
    ],
)
def test_arguments(number: int, change: Change, message: str) -> None:
    arguments = arguments_of(running())
    arguments[number] = change(arguments[number])
    check_refused(ops.causal_forward_, arguments, message)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("config.num_layers", 0, " is 0; expected 1 to"),
        ("config.num_layers", 1 << 40, " is 1099511627776; expected 1 to"),
        ("config.num_layers", None, " is absent; expected 1 to"),
        ("config.model_size", 0, " is 0"),
        ("config.num_heads", 0, " is 0"),
        ("config.num_kv_heads", 0, " is 0"),
        ("config.num_kv_heads", 3, " is 3; expected a divisor of num_heads, 4"),
        ("config.head_size", 0, " is 0"),
        ("config.ffn_size", 0, " is 0"),
        ("config.vocab_size", 0, " is 0"),
        ("config.vocab_size", 1 << 31, " is 2147483648; expected 1 to 2147483647"),
        ("config.vocab_size", 101.0, " is 101.0; expected an integer, 1 to 2147483647"),
        ("config.rotary_size", -2, " is -2"),
        ("config.rotary_size", 11, " is 11; expected an even number up to 12"),
        ("config.rotary_size", 14, " is 14; expected an even number up to 12"),
        ("config.rotary_scales", "1", ' is "1"; expected a list'),
        ("config.rotary_scales", [None], " is null; expected a number"),
        ("config.rotary_scales", [1.0] * 3, None),
        ("norms_all_heads", 2, " is 2; expected 0 to 1"),
        ("config.activation", "none", ' is "none"; expected one of "relu", "gelu", '),
        ("config.norm_epsilon", 1e300, " is 1e+300; expected a number"),
        ("config.norm_epsilon", float("inf"), " is Infinity; expected a number"),
        ("config.gated", None, " is absent; expected 0 to 1"),
        ("config.norm_epsilon", None, " is absent; expected a number"),
        ("config.norm", None, ' is absent; expected one of "layer_norm", "rms_norm"'),
        ("layers.1.cache", None, " is absent; expected 0 to 1"),
        ("config.norm", "norm", ' is "norm"; expected one of "layer_norm", "rms_norm"'),
        ("config.gated", 2, " is 2; expected 0 to 1"),
        ("config.activation", "elu", ' is "elu"; expected one of "relu", "gelu", '),
        ("weight_format", None, ' is absent; expected one of "float32", "bfloat16", '),
        ("embedding_format", 4, " is 4; expected 0 to 3"),
        ("config.norm_epsilon", "x", ' is "x"; expected a number'),
        ("config.windows", [7], " has 1 entries; expected 3"),
        ("config.windows", [7, -1, 7], " is -1; expected 1 to 2147483647"),
        ("config.rotary", [1, -1, 1], " is -1; expected 0 to 1"),
        ("config.rotary", [1, 2, 1], " is 2; expected 0 to 1"),
        ("layers.1.cache", -1, " is -1; expected 0 to 1"),
        ("layers.1.cache", 2, " is 2; expected 0 to 1"),
        ("layers.1.cache_layer", 3, " is 3; expected 0 to 2"),
        ("weights.logits", None, " is absent; expected it"),
        ("weights.rotary", None, " is absent; expected it"),
        ("weights.layers.0.qkv", None, " is absent; expected it"),
        ("weights.logits", 64, " is 64; expected a list"),
        ("weights.logits", [64], " has 1 entries; expected 2"),
        ("weights.qkv", [24640, 0], None),
        ("weights.layers.3.qkv", [24640, 128], None),
        ("config.other", 0, None),
    ],
)
def test_entries_of_the_record(name: str, value: Any, message: str | None) -> None:
    arguments = arguments_of(running())
    arguments[WEIGHTS] = with_entries(arguments[WEIGHTS], {name: value})
    wanted = f"weights has a record with {name}; expected no entry" if message is None else ""
    if name == "config.rotary_scales" and message is None:
        wanted = "weights.rotary has 48 bytes; expected 18 of 4"
    wanted = re.escape(wanted or f"{name}{message}")
    check_refused(ops.causal_forward_, arguments, wanted)
    check_refused(ops.causal_workspace_bytes, [arguments[WEIGHTS], [1, 1, 1]], wanted)


@pytest.mark.parametrize(
    ("name", "value", "layer"),
    [
        ("layers.1.cache", 1, r"1 has layer 0 of cache 1; .* with its window at least"),
        ("config.windows", [None] * 3, r"0 has layer 0 of cache 1; .* with its window at least"),
        ("config.windows", [WINDOW + 1, None, None], r"0 has layer 0 of cache 1"),
    ],
)
def test_layers_of_other_caches(name: str, value: Any, layer: str) -> None:
    arguments = arguments_of(running())
    arguments[WEIGHTS] = with_entries(arguments[WEIGHTS], {name: value})
    check_refused(ops.causal_forward_, arguments, rf"layers.{layer}")


def test_sizes_together() -> None:
    most = (1 << 31) - 1
    names = ("num_heads", "num_kv_heads", "head_size", "global_num_kv_heads", "global_head_size")
    huge = {f"config.{name}": most for name in names}
    memory = with_entries(packed("gemma3_text", "plain").memory, huge)
    message = f"config has {most} heads of {most}; expected fewer than 2.31 in all"
    check_refused(ops.causal_workspace_bytes, [memory, [1, 1, 1]], message)
    arguments = arguments_of(running())
    sizes = {"num_heads": 1 << 20, "num_kv_heads": 1 << 20, "head_size": 1 << 12}
    changes = {f"config.{name}": size for name, size in sizes.items()}
    arguments[WEIGHTS] = with_entries(arguments[WEIGHTS], changes)
    check_refused(ops.causal_forward_, arguments, "config has 1048576 heads of 4096; expected few")


@pytest.mark.parametrize("offset", [32, -64, 0, 1 << 40, (1 << 63) - 64])
@pytest.mark.parametrize(
    "name", ["logits", "rotary", "layers.2.qkv", "layers.2.attention_norm_gamma"]
)
def test_parts_that_are_not_in_the_memory(name: str, offset: int) -> None:
    arguments = arguments_of(running())
    _, size = read_record(arguments[WEIGHTS])[f"weights.{name}"]
    arguments[WEIGHTS] = with_entries(arguments[WEIGHTS], {f"weights.{name}": [offset, size]})
    message = f"weights.{name} is at byte {offset}; expected a multiple of 64 behind the record"
    check_refused(ops.causal_forward_, arguments, re.escape(message))


def test_parts_of_other_sizes() -> None:
    """A part that is too short, too long, or longer than the memory."""
    arguments = arguments_of(running())
    memory, record = arguments[WEIGHTS], read_record(arguments[WEIGHTS])
    for name in ("rotary", "logits", "layers.1.qkv", "layers.2.attention_norm_gamma"):
        offset, size = record[f"weights.{name}"]
        for other in (0, size - 4, size + 4, size + 64, 1 << 40, -4):
            changes = {f"weights.{name}": [offset, other]}
            arguments[WEIGHTS] = with_entries(memory, changes)
            message = rf"weights.{name} (has .*; expected|is absent|is at byte)"
            check_refused(ops.causal_forward_, arguments, message)


def test_records_that_are_no_text() -> None:
    arguments = arguments_of(running())
    memory = arguments[WEIGHTS]
    for text, message in [
        (b"kind", "other text behind 0 entries; expected lines of a name and a value"),
        (b"kind\n", "other text behind 0 entries"),
        (b'kind "causal"\nb', "other text behind 1 entries"),
        (b'kind "causal"\nkind "causal"\n', "kind is in the record twice; expected it once"),
        (b"k\x00 1\n", "weights has a record of other bytes; expected printable ASCII"),
        (b'kind "decoder"\n', 'weights are of kind "decoder"; expected "causal"'),
        (b"config.num_layers 1\n", 'weights are of kind none; expected "causal"'),
    ]:
        head = bytearray(memory[:64].tolist())
        head[12:24] = struct.pack("<IQ", zlib.crc32(text), len(text))
        arguments[WEIGHTS] = memory.clone()
        arguments[WEIGHTS][: 64 + len(text)] = torch.tensor([*head, *text], dtype=torch.uint8)
        check_refused(ops.causal_forward_, arguments, f"(weights has a record with )?{message}")
    for place, message in [
        (0, "weights has no record in its"),
        (8, "weights has a record of version 2; expected 1: pack the model again"),
        (12, "weights has a record with the checksum .*: pack the model again"),
        (70, "weights has a record with the checksum .*: pack the model again"),
        (22, "weights has .* bytes; expected .*, as its record says"),
        (31, "weights has .* bytes; expected .*, as its record says"),
    ]:
        arguments[WEIGHTS] = memory.clone()
        arguments[WEIGHTS][place] ^= 3
        check_refused(ops.causal_forward_, arguments, message)


def test_weights_that_lie_elsewhere() -> None:
    arguments = arguments_of(running())
    memory, record = arguments[WEIGHTS], read_record(arguments[WEIGHTS])
    other = record["weights.layers.0.attention_out"]  # another packed weight
    arguments[WEIGHTS] = with_entries(memory, {"weights.layers.0.qkv": other})
    message = r"weights.layers.0.qkv has shape .*; expected .* at least, from config"
    check_refused(ops.causal_forward_, arguments, message)
    sizes = [record[f"weights.layers.0.{name}"] for name in ("attention_norm_gamma", "qkv")]
    norm = [sizes[0][0], sizes[1][1]]
    arguments[WEIGHTS] = with_entries(memory, {"weights.layers.0.qkv": norm})
    message = "weights.layers.0.qkv holds other bytes than a packed"
    check_refused(ops.causal_forward_, arguments, message)
    memory = arguments_of(running("llama", "int8"))[WEIGHTS]
    arguments = arguments_of(running("llama", "int8"))
    arguments[WEIGHTS] = with_entries(memory, {"weight_format": "float32", "embedding_format": 1})
    check_refused(ops.causal_forward_, arguments, "weights.embedding has .* bytes; expected")
    arguments[WEIGHTS] = with_entries(memory, {"weights.embedding": None})
    check_refused(ops.causal_forward_, arguments, "weights.embedding is absent; expected it")


def test_weights_that_change_between_steps() -> None:
    """What a step has checked is checked again where it is not as it was, in place or elsewhere."""
    caches = running("llama", "int8")
    arguments = arguments_of(caches)
    ops.causal_forward_(*arguments)
    arguments = forward_arguments(caches, Entry(0, random_tokens(1), False))
    memory, record = arguments[WEIGHTS], read_record(arguments[WEIGHTS])
    for name in ("logits", "layers.0.qkv", "layers.1.qkv"):
        header = memory[record[f"weights.{name}"][0] :][:8]
        good = header.clone()
        header[4] = 100
        check_refused(ops.causal_forward_, arguments, "weights.* has format 100; expected 0 to")
        header[0] += 1
        check_refused(ops.causal_forward_, arguments, "weights.* holds other bytes than a packed")
        header.copy_(good)
    text = memory[: record_bytes(record["config.num_layers"])]
    good = text.clone()
    changes = {"weights.layers.0.qkv": [1 << 40, 64]}
    text.copy_(with_entries(memory, changes)[: len(text)])
    check_refused(ops.causal_forward_, arguments, "weights.layers.0.qkv is at byte")
    text.copy_(good)
    arguments[WEIGHTS] = memory[:-64]
    check_refused(ops.causal_forward_, arguments, "weights has .* bytes; expected")
    arguments[WEIGHTS] = memory.clone()
    assert ops.causal_forward_(*arguments).shape == (1, VOCAB)


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (POOL, lambda p: p[:, :, :1].contiguous(), "caches.pool has 1 heads of 12; expected 2"),
        (POOL, lambda p: p[..., :6].contiguous(), "caches.pool has 2 heads of 6; expected 2 of 12"),
        (POOL, lambda p: p[..., :0, :].contiguous(), "caches.pool has shape .* 1 to 2.20 positi"),
    ],
)
@pytest.mark.parametrize("cache", [0, 1])
def test_tensors_of_caches(cache: int, place: int, change: Change, message: str) -> None:
    """Of either cache."""
    arguments = arguments_of(running())
    caches = arguments[CACHES] = list(arguments[CACHES])
    caches[6 * cache + place] = change(caches[6 * cache + place])
    check_refused(ops.causal_forward_, arguments, message)


@pytest.mark.parametrize("place", range(6))
def test_tensors_of_caches_on_other_devices(place: int) -> None:
    arguments = arguments_of(running())
    caches = arguments[CACHES] = list(arguments[CACHES])
    caches[6 + place] = caches[6 + place].to("meta")
    check_refused(ops.causal_forward_, arguments, rf"caches\[{6 + place}\] is on meta")
    windows, parents = arguments[WINDOWS], torch.arange(3)
    name = rf"caches\[{6 + place}\] is on meta"
    check_refused(ops.causal_caches_reorder_, [caches, windows, parents], name)
    lengths = torch.tensor([[0, 70]])
    check_refused(ops.causal_caches_truncate_, [caches, windows, lengths], name)


def test_the_number_of_caches() -> None:
    arguments = arguments_of(running())
    arguments[CACHES] = arguments[CACHES][:-1]
    check_refused(ops.causal_forward_, arguments, "caches has 11 tensors; expected 12")
    arguments = arguments_of(running())
    arguments[CACHES], arguments[WINDOWS] = arguments[CACHES][:6], arguments[WINDOWS][:1]
    message = r"layers.0 has layer 0 of cache 1; expected one that caches have"
    check_refused(ops.causal_forward_, arguments, message)


# Each is followed by an op, or tells how many of them are.
@pytest.mark.parametrize(
    ("place", "index", "value", "message"),
    [
        (BLOCKS, (0, 0), 9, r"caches.blocks\[0, 0\] is 9; expected a block in use, 0 to 8"),
        (BLOCKS, (0, 2), -2, r"caches.blocks\[0, 2\] is -2; expected a block in use"),
        (BLOCKS, (0, 2), -1, r"caches.blocks\[0, 2\] is -1; expected a block in use"),
        (BLOCKS, (1, 0), 8, r"caches.blocks\[1, 0\] is 8; expected a block in use"),  # a free one
        (LENGTHS, 0, 71, r"caches.lengths\[0\] is 7[01]; expected 0 to 96, the same in each cache"),
        (COUNTERS, 0, -1, r"caches.counters\[0\] is -1; expected 0 to 9 free blocks"),
        (COUNTERS, 0, 10, r"caches.counters\[0\] is 10; expected 0 to 9 free blocks"),
    ],
)
@pytest.mark.parametrize("cache", [0, 1])
def test_damaged_tables(cache: int, place: int, index: Any, value: int, message: str) -> None:
    caches = running()
    tensors = caches._tensors
    assert tensors[POOL].shape[3] == tensors[6 + POOL].shape[3] == 9
    if place == BLOCKS and index == (0, 0) and cache == 1:
        index, message = (0, 2), message.replace("0, 0", "0, 2")  # that one has been let go
    if place == FREE_BLOCKS:  # the one that is taken next
        index += int(tensors[6 * cache + COUNTERS][0])
    tensors[6 * cache + place][index] = value
    check_refused(ops.causal_forward_, arguments_of(caches), message)
    windows = caches.model.cache_windows
    if place == FREE_BLOCKS or (place == BLOCKS and value == -1):
        return  # not followed
    parents = torch.arange(3)
    check_refused(ops.causal_caches_reorder_, [tensors, windows, parents], message)
    changes = torch.tensor([[0, 70], [1, 2]])
    check_refused(ops.causal_caches_truncate_, [tensors, windows, changes], message)


@pytest.mark.parametrize("cache", [0, 1])
def test_caches_of_other_blocks(cache: int) -> None:
    """What fits one cache need not fit the other: of 3 blocks of 16 positions, here."""
    caches = running()
    caches.truncate(range(3), [0] * 3)
    pool = 6 * cache + POOL
    caches._tensors[pool] = caches._tensors[pool][..., :16, :].contiguous()
    message = r"entries\[0\].count is 49; expected 1 to 48"
    too_many = Entry(2, random_tokens(49))
    check_refused(ops.causal_forward_, forward_arguments(caches, too_many), message)
    assert step(caches, Entry(2, random_tokens(48)))[0].isfinite().all()


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((0, 0), -1, r"\[0\].sequence is -1; expected 0 to 2"),
        ((1, 0), 3, r"\[1\].sequence is 3; expected 0 to 2"),
        ((0, 1), 0, r"\[0\].count is 0; expected 1 to 26"),
        ((0, 1), -5, r"\[0\].count is -5; expected 1 to 26"),
        ((0, 1), 27, r"\[0\].count is 27; expected 1 to 26"),
        ((1, 1), 97, r"\[1\].count is 97; expected 1 to 96"),
        ((1, 1), (1 << 63) - 1, r"\[1\].count is 9223372036854775807; expected 1 to 96"),
        ((0, 2), 2, r"\[0\].is_prompt is 2; expected 0 to 1"),
        ((0, 2), -1, r"\[0\].is_prompt is -1; expected 0 to 1"),
    ],
)
def test_entries(place: tuple[int, int], value: int, message: str) -> None:
    arguments = arguments_of(running())
    arguments[ENTRIES][place] = value
    check_refused(ops.causal_forward_, arguments, f"entries{message}")


@pytest.mark.parametrize(("place", "token"), [(0, -1), (7, VOCAB), (3, 1 << 40)])
def test_tokens_out_of_the_vocabulary(place: int, token: int) -> None:
    arguments = arguments_of(running())
    arguments[TOKENS][place] = token
    message = rf"tokens\[{place}\] is {token}; expected 0 to {VOCAB - 1}"
    check_refused(ops.causal_forward_, arguments, message)


def test_positions_that_the_model_does_not_have() -> None:
    caches = new_caches(packed("gpt2", "plain"), 1, 300)
    step(caches, Entry(0, random_tokens(250)))
    message = r"entries\[0\] ends at position 257; expected at most 256, what the model has"
    too_many = Entry(0, random_tokens(7))
    check_refused(ops.causal_forward_, forward_arguments(caches, too_many), message)
    assert step(caches, Entry(0, random_tokens(6)))[0].isfinite().all()


def with_blocks(caches: CausalCaches, cache: int, count: int) -> None:
    """Leave a cache only so many free blocks."""
    caches._tensors[6 * cache + COUNTERS][0] = count


def test_too_few_blocks() -> None:
    """Known before anything is read."""
    caches = running()
    with_blocks(caches, 0, 2)
    entries = (Entry(1, random_tokens(30)), Entry(2, random_tokens(65)))
    message = "caches.pool has 9 blocks; expected 2 more for 95 tokens"
    check_refused(ops.causal_forward_, forward_arguments(caches, *entries), message)
    with_blocks(caches, 0, 4)
    assert torch.cat(step(caches, *entries)).isfinite().all()


def test_too_few_blocks_of_a_window() -> None:
    """These become free meanwhile: it is known at the rows that have none. The rest is read."""
    caches = running()
    with_blocks(caches, 1, 0)
    with pytest.raises(
        RuntimeError, match=r"cache 1, with a window, has 9 blocks; expected 1 more"
    ):
        step(caches, Entry(0, random_tokens(3), False), Entry(1, random_tokens(40)))
    # 16 rows were computed together: 3 of the first sequence, 13 of the second.
    assert caches.lengths.tolist() == caches._tensors[6 + LENGTHS].tolist() == [73, 18, 0]
    with_blocks(caches, 1, 2)
    assert step(caches, Entry(1, random_tokens(27)))[0].isfinite().all()


def test_truncate_beyond_the_window() -> None:
    caches, lengths = running(), torch.tensor([[1, 0], [0, 40]])
    arguments = [caches._tensors, caches.model.cache_windows, lengths]
    message = r"lengths\[1\] goes back to 40 of 70 positions; .*, 7 "
    check_refused(ops.causal_caches_truncate_, arguments, message)


@pytest.mark.parametrize("sizes", [[], [1, 1], [1, 1, 1, 1]])
def test_the_number_of_sizes_of_a_workspace(sizes: list[int]) -> None:
    model = packed("gemma3_text", "plain")
    call = [model.memory, sizes]
    check_refused(ops.causal_workspace_bytes, call, f"sizes has {len(sizes)} numbers; expected 3")


@pytest.mark.parametrize(
    ("place", "name", "most"),
    [(0, "max_rows", 1 << 20), (1, "sequences", 1 << 20), (2, "max_blocks", 1 << 24)],
)
def test_sizes_of_a_workspace(place: int, name: str, most: int) -> None:
    model = packed("gemma3_text", "plain")
    for value in (0, -1, most + 1):
        sizes = [1, 1, 1]
        sizes[place] = value
        message = rf"sizes.{name} is {value}; expected 1 to {most}"
        check_refused(ops.causal_workspace_bytes, [model.memory, sizes], message)
