"""The ops of decoder-only models: what does not fit is refused by its name, before any change."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lmdecode.decoder.causal_caches import CausalCaches
from tests.decoder.causal_steps import Entry, forward_arguments, new_caches, packed, state, step
from tests.support.causal_models import VOCAB, WINDOW, random_tokens
from tests.support.op_contract import assert_op_refuses

ops = torch.ops.lmdecode

(WEIGHTS, LAYOUT, CONFIG, NUMBERS, CACHES, WINDOWS, WORKSPACE, TOKENS, ENTRIES, NUM_LOGITS,
 MAX_ROWS) = range(11)  # fmt: skip
POOL, BLOCKS, LENGTHS, REF_COUNTS, FREE_BLOCKS, COUNTERS = range(6)
# Columns of a layout's row: of the model, and of a layer.
EMBEDDING, POSITIONS, ROTARY, _, _, LOGITS, _ = range(7)
LAYER_WINDOW, LAYER_ROTARY, LAYER_CACHE, CACHE_LAYER, _, _, NORM, _, QKV, QKV_BIAS = range(10)


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
        (WEIGHTS, lambda w: w.view(torch.int8), "weights has dtype int8; expected uint8"),
        (WEIGHTS, lambda w: w[None], r"weights has shape \[1, .*expected \[bytes\], contiguous"),
        (WEIGHTS, strided, "weights has shape .* contiguous"),
        (WEIGHTS, at_odd_address, "weights has shape .* aligned to 64"),
        (LAYOUT, lambda t: t.int(), "layout has dtype int32; expected int64"),
        (LAYOUT, lambda t: t[:-1], r"layout has shape \[3, 50\]; expected \[4, 50\]"),
        (LAYOUT, lambda t: t[:, :-1].contiguous(), r"layout has shape \[4, 49\]"),
        (LAYOUT, lambda t: t[0], r"layout has shape \[50\]"),
        (LAYOUT, strided, "layout has shape .* contiguous"),
        (CONFIG, lambda c: c[:-1], "config has 37 numbers; expected 38"),
        (NUMBERS, lambda n: n[:-1], "numbers has 15 entries; expected 16"),
        (WINDOWS, lambda w: [], "windows has 0 entries; expected 1 to 2"),
        (WINDOWS, lambda w: [*w, 1], "windows has 3 entries; expected 1 to 2"),
        (WINDOWS, lambda w: [w[0], -1], r"windows\[1\] is -1; expected 0 to"),
        (WINDOWS, lambda w: w[:1], "caches has 12 tensors; expected 6"),
        (WINDOWS, lambda w: [w[0], WINDOW - 1], r"layout\[1\] has layer 0 of cache 1; expected"),
        (WORKSPACE, lambda w: w.view(torch.int8), "workspace has dtype int8; expected uint8"),
        (WORKSPACE, lambda w: w[:-1], "workspace has .* bytes on cpu; expected at least"),
        (WORKSPACE, at_odd_address, "workspace has .* aligned to 64"),
        (WORKSPACE, strided, "workspace has .* bytes"),
        (TOKENS, lambda t: t.int(), "tokens has dtype int32; expected int64"),
        (TOKENS, lambda t: t[None], r"tokens has shape \[1, 8\]; expected \[-1\]"),
        (TOKENS, lambda t: t[:-1], "tokens has 7 entries; expected 8, as entries say"),
        (TOKENS, lambda t: torch.cat((t, t[:1])), "tokens has 9 entries; expected 8"),
        (TOKENS, strided, "tokens has strides; expected a contiguous tensor"),
        (ENTRIES, lambda e: e.int(), "entries has dtype int32; expected int64"),
        (ENTRIES, lambda e: e.view(-1), r"entries has shape \[8\]; .* \[entries, 4\]"),
        (ENTRIES, lambda e: e[:, :3].contiguous(), r"entries has shape \[2, 3\]; expected \[-1, 4"),
        (ENTRIES, strided, "entries has strides; expected a contiguous tensor"),
        (NUM_LOGITS, lambda n: n + 1, "num_logits is 4; expected 3, as entries say"),
        (NUM_LOGITS, lambda n: -1, "num_logits is -1; expected 3"),
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
    ("number", "message"),
    [
        (WEIGHTS, "weights is on meta; expected the device of workspace, cpu"),
        (LAYOUT, "layout is on meta; expected the device of workspace, cpu"),
        (WORKSPACE, "weights is on cpu; expected the device of workspace, meta"),
        (TOKENS, "tokens is on meta; expected the device of workspace, cpu"),
        (ENTRIES, "entries is on meta; expected the device of workspace, cpu"),
    ],
)
def test_tensors_on_other_devices(number: int, message: str) -> None:
    arguments = arguments_of(running())
    arguments[number] = arguments[number].to("meta")
    check_refused(ops.causal_forward_, arguments, message)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, 0, "num_layers is 0"),
        (1, 0, "model_size is 0"),
        (2, 0, "num_heads is 0"),
        (3, 0, "num_kv_heads is 0"),
        (3, 3, "num_kv_heads is 3; expected a divisor of num_heads, 4"),
        (4, 0, "head_size is 0"),
        (5, 0, "ffn_size is 0"),
        (6, 0, "vocab_size is 0"),
        (6, 1 << 31, "vocab_size is 2147483648; expected 1 to 2147483647"),
        (7, -2, "rotary_size is -2"),
        (7, 11, "rotary_size is 11; expected an even number up to 12"),
        (7, 14, "rotary_size is 14; expected an even number up to 12"),
        (8, -1, "num_rotary is -1"),
        (8, 1025, "num_rotary is 1025; expected 0 to 1024"),
        (9, -1, "num_positions is -1"),
        (9, 5, "num_positions is 5; expected 0 just where weights have no positions"),
        (10, 2, "norms_all_heads is 2; expected 0 to 1"),
        (11, 2, "norm is 2; expected 0 to 1"),
        (12, 2, "gated is 2; expected 0 to 1"),
        (13, 0, "activation is 0; expected 1 to 4"),
        (13, 5, "activation is 5; expected 1 to 4"),
        (14, 100, "format is 100; expected -1 to"),
        (15, 4, "embedding_format is 4; expected 0 to 3"),
    ],
)
def test_sizes(place: int, value: int, message: str) -> None:
    arguments = arguments_of(caches := running())
    sizes = arguments[CONFIG] = list(arguments[CONFIG])
    sizes[place] = value
    check_refused(ops.causal_forward_, arguments, f"config.{message}")
    if "just where" in message:
        return
    call = [sizes, caches.model.numbers, [1, 1, 1]]
    check_refused(ops.causal_workspace_bytes, call, f"config.{message}")


def test_sizes_together() -> None:
    arguments = arguments_of(running())
    arguments[CONFIG] = [*arguments[CONFIG][:2], 1 << 20, 1 << 20, 1 << 12, *arguments[CONFIG][5:]]
    check_refused(ops.causal_forward_, arguments, "config has 1048576 heads of 4096; expected few")


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((0, LOGITS), -1, "weights have no logits; expected it"),
        ((0, LOGITS), 32, "layout has logits at byte 32; expected a multiple of 64"),
        ((0, LOGITS), -64, "layout has logits at byte -64"),
        ((0, LOGITS), 1 << 40, "layout has logits at byte 1099511627776; .* in a memory of"),
        ((0, LOGITS), (1 << 63) - 64, "layout has logits at byte 9223372036854775744"),
        ((0, ROTARY), -1, "weights have no rotary; expected it"),
        ((0, ROTARY), 1 << 40, "layout has rotary at byte"),
        ((0, POSITIONS), 0, "config.num_positions is 0; expected 0 just where"),
        ((1, QKV), -1, "weights have no qkv; expected it"),
        ((3, QKV), 64 * 10**6, "layout has qkv at byte 64000000"),
        ((3, NORM), 1 << 40, "layout has attention_norm_gamma at byte"),
        ((2, QKV_BIAS), -2, "layout has qkv_bias at byte -2"),
        ((2, LAYER_WINDOW), -1, r"layout\[2\].window is -1; expected 0 to 2147483647"),
        ((2, LAYER_ROTARY), -2, r"layout\[2\].rotary is -2; expected -1 to 1"),
        ((2, LAYER_ROTARY), 2, r"layout\[2\].rotary is 2; expected -1 to 1"),
        ((2, LAYER_CACHE), -1, r"layout\[2\].cache is -1; expected 0 to 1"),
        ((2, LAYER_CACHE), 2, r"layout\[2\].cache is 2; expected 0 to 1"),
        ((2, CACHE_LAYER), 3, r"layout\[2\].cache_layer is 3; expected 0 to 2"),
        ((2, CACHE_LAYER), 1, r"layout\[2\] has layer 1 of cache 0; expected one that caches have"),
        ((2, LAYER_CACHE), 1, r"layout\[2\] has layer 0 of cache 1; .* with its window at least"),
        ((1, LAYER_WINDOW), 0, r"layout\[1\] has layer 0 of cache 1; .* with its window at least"),
        ((1, LAYER_WINDOW), WINDOW + 1, r"layout\[1\] has layer 0 of cache 1"),
    ],
)
def test_a_damaged_layout(place: tuple[int, int], value: int, message: str) -> None:
    arguments = arguments_of(running())
    layout = arguments[LAYOUT] = arguments[LAYOUT].clone()
    layout[place] = value
    check_refused(ops.causal_forward_, arguments, message)


def test_weights_that_lie_elsewhere() -> None:
    arguments = arguments_of(running())
    layout = arguments[LAYOUT] = arguments[LAYOUT].clone()
    layout[1, QKV] = layout[1, QKV + 4]  # another packed weight
    check_refused(ops.causal_forward_, arguments, r"weights.qkv is a weight of shape \[32, 48\]; ")
    layout[1, QKV] = layout[1, NORM]
    check_refused(ops.causal_forward_, arguments, "weights.qkv holds other bytes than a packed")
    arguments = arguments_of(running("llama", "int8"))
    arguments[CONFIG] = [*arguments[CONFIG][:14], 0, 1, *arguments[CONFIG][16:]]
    check_refused(ops.causal_forward_, arguments, "layout has embedding at byte|weights.logits has")
    arguments = arguments_of(running("llama", "int8"))
    layout = arguments[LAYOUT] = arguments[LAYOUT].clone()
    layout[0, EMBEDDING] = -1
    check_refused(ops.causal_forward_, arguments, "weights have no embedding; expected it")


def test_weights_that_change_between_steps() -> None:
    """What a step has checked is checked again where it is not as it was, in place or elsewhere."""
    caches = running("llama", "int8")
    arguments = arguments_of(caches)
    ops.causal_forward_(*arguments)
    arguments = forward_arguments(caches, Entry(0, random_tokens(1), False))
    memory, layout = arguments[WEIGHTS], arguments[LAYOUT]
    for row, column in [(0, LOGITS), (1, QKV), (2, QKV)]:
        header = memory[int(layout[row, column]) :][:8]
        good = header.clone()
        header[4] = 100
        check_refused(ops.causal_forward_, arguments, "weights.* has format 100; expected 0 to")
        header[0] += 1
        check_refused(ops.causal_forward_, arguments, "weights.* holds other bytes than a packed")
        header.copy_(good)
    good = int(layout[1, QKV])
    layout[1, QKV] = 1 << 40
    check_refused(ops.causal_forward_, arguments, "layout has qkv at byte")
    layout[1, QKV] = good
    for shape in [(-1,), (1, *layout.shape)]:  # the same numbers
        arguments[LAYOUT] = layout.view(shape)
        check_refused(ops.causal_forward_, arguments, "layout has shape")
    arguments[LAYOUT] = layout
    arguments[WEIGHTS] = memory[:-64]
    check_refused(ops.causal_forward_, arguments, "weights.* has shape|layout has .* at byte")
    arguments[WEIGHTS] = memory.clone()
    assert ops.causal_forward_(*arguments).shape == (1, VOCAB)


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (POOL, lambda p: p.half(), "caches.pool has dtype float16; expected float32, bf"),
        (POOL, lambda p: p[0], "caches.pool has shape .*expected .*layers, 2, kv_heads, num_bl"),
        (
            POOL,
            lambda p: p.transpose(3, 4),
            "caches.pool has strides; expected a contiguous tensor",
        ),
        (POOL, strided, "caches.pool has strides; expected a contiguous tensor"),
        (POOL, lambda p: p[:, :1].contiguous(), r"caches.pool has shape .* \[-1, 2, -1, -1"),
        (POOL, lambda p: p[:, :, :1].contiguous(), "caches.pool has 1 heads of 12; expected 2"),
        (POOL, lambda p: p[..., :6].contiguous(), "caches.pool has 2 heads of 6; expected 2 of 12"),
        (POOL, lambda p: p[:0].contiguous(), r"layout\[.\] has layer 0 of cache .; expected"),
        (POOL, lambda p: p[..., :0, :].contiguous(), "caches.pool has shape .* 1 to 2.20 positi"),
        (POOL, lambda p: p[:, :, :, :-1].contiguous(), r"caches.ref_counts has shape .*expected"),
        (BLOCKS, lambda b: b.long(), "caches.blocks has dtype int64; expected int32"),
        (BLOCKS, lambda b: b[0], r"caches.blocks has shape \[3\]; expected \[-1, -1\]"),
        (BLOCKS, lambda b: b[:2], "caches.lengths has shape|caches.blocks has shape"),
        (BLOCKS, lambda b: b[:, :2].contiguous(), r"caches.blocks has shape|caches.lengths\[0\] "),
        (BLOCKS, strided, "caches.blocks has strides"),
        (LENGTHS, lambda n: n.long(), "caches.lengths has dtype int64; expected int32"),
        (LENGTHS, lambda n: n[:2], r"caches.lengths has shape \[2\]; expected \[3\]"),
        (REF_COUNTS, lambda n: n[:-1], "caches.ref_counts has shape"),
        (REF_COUNTS, lambda n: n.short(), "caches.ref_counts has dtype int16"),
        (FREE_BLOCKS, lambda n: n[:-1], "caches.free_blocks has shape"),
        (FREE_BLOCKS, lambda n: n.long(), "caches.free_blocks has dtype int64"),
        (COUNTERS, lambda n: n[:2], r"caches.counters has shape \[2\]; expected \[3\]"),
        (COUNTERS, lambda n: n.long(), "caches.counters has dtype int64"),
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
    message = r"layout\[1\] has layer 0 of cache 1; expected one that caches have"
    check_refused(ops.causal_forward_, arguments, message)


# Each is followed by an op, or tells how many of them are.
@pytest.mark.parametrize(
    ("place", "index", "value", "message"),
    [
        (BLOCKS, (0, 0), 9, r"caches.blocks\[0, 0\] is 9; expected a block in use, 0 to 8"),
        (BLOCKS, (0, 2), -2, r"caches.blocks\[0, 2\] is -2; expected a block in use"),
        (BLOCKS, (0, 2), -1, r"caches.blocks\[0, 2\] is -1; expected a block in use"),
        (BLOCKS, (1, 0), 8, r"caches.blocks\[1, 0\] is 8; expected a block in use"),  # a free one
        (LENGTHS, 0, -1, r"caches.lengths\[0\] is -1; expected 0 to 96"),
        (LENGTHS, 0, 97, r"caches.lengths\[0\] is 97; expected 0 to 96"),
        (LENGTHS, 0, 71, r"caches.lengths\[0\] is 7[01]; expected 0 to 96, the same in each cache"),
        (COUNTERS, 0, -1, r"caches.counters\[0\] is -1; expected 0 to 9 free blocks"),
        (COUNTERS, 0, 10, r"caches.counters\[0\] is 10; expected 0 to 9 free blocks"),
        (FREE_BLOCKS, -1, 9, r"caches.free_blocks\[[0-9]\] is 9; expected 0 to 8"),
        (FREE_BLOCKS, -1, -1, r"caches.free_blocks\[[0-9]\] is -1; expected 0 to 8"),
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
        ((1, 0), 0, r"\[1\].sequence is 0 once more; expected each at most once"),
        ((0, 1), 0, r"\[0\].count is 0; expected 1 to 26"),
        ((0, 1), -5, r"\[0\].count is -5; expected 1 to 26"),
        ((0, 1), 27, r"\[0\].count is 27; expected 1 to 26"),
        ((1, 1), 97, r"\[1\].count is 97; expected 1 to 96"),
        ((1, 1), (1 << 63) - 1, r"\[1\].count is 9223372036854775807; expected 1 to 96"),
        ((0, 2), 2, r"\[0\].is_prompt is 2; expected 0 to 1"),
        ((0, 2), -1, r"\[0\].is_prompt is -1; expected 0 to 1"),
        ((1, 3), 8, r"\[1\].num_logits is 8; expected 0 to 7"),
        ((1, 3), -1, r"\[1\].num_logits is -1; expected 0 to 7"),
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


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        (torch.arange(3).int(), "parents has dtype int32; expected int64"),
        (torch.arange(2), r"parents has shape \[2\]; expected \[3\]"),
        (torch.arange(4), r"parents has shape \[4\]; expected \[3\]"),
        (torch.arange(3)[None], r"parents has shape \[1, 3\]; expected \[3\]"),
        (strided(torch.arange(3)), "parents has strides"),
        (torch.tensor([0, 3, 1]), r"parents\[1\] is 3; expected 0 to 2"),
        (torch.tensor([0, 1, -1]), r"parents\[2\] is -1; expected 0 to 2"),
    ],
)
def test_reorder(parents: Tensor, message: str) -> None:
    caches = running()
    arguments = [caches._tensors, caches.model.cache_windows, parents]
    check_refused(ops.causal_caches_reorder_, arguments, message)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (torch.zeros(1, 2).int(), "lengths has dtype int32; expected int64"),
        (torch.zeros(2).long(), r"lengths has shape \[2\]; expected \[-1, 2\]"),
        (torch.zeros(1, 3).long(), r"lengths has shape \[1, 3\]; expected \[-1, 2\]"),
        (torch.zeros(2, 2).long().T[:, :1].expand(2, 2), "lengths has strides"),
        (torch.tensor([[0, 0], [3, 0]]), r"lengths\[2\] is 3; expected 0 to 2"),
        (torch.tensor([[-1, 0]]), r"lengths\[0\] is -1; expected 0 to 2"),
        (torch.tensor([[1, 0], [0, 71]]), r"lengths\[3\] is 71; expected 0 to 70"),
        (torch.tensor([[1, 0], [2, 1]]), r"lengths\[3\] is 1; expected 0 to 0"),
        (torch.tensor([[1, -1]]), r"lengths\[1\] is -1; expected 0 to 5"),
        (torch.tensor([[1, 0], [0, 40]]), r"lengths\[1\] goes back to 40 of 70 positions; .*, 7 "),
    ],
)
def test_truncate(lengths: Tensor, message: str) -> None:
    caches = running()
    arguments = [caches._tensors, caches.model.cache_windows, lengths]
    check_refused(ops.causal_caches_truncate_, arguments, message)


@pytest.mark.parametrize("sizes", [[], [1, 1], [1, 1, 1, 1]])
def test_the_number_of_sizes_of_a_workspace(sizes: list[int]) -> None:
    model = packed("gemma3_text", "plain")
    call = [model.sizes, model.numbers, sizes]
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
        check_refused(ops.causal_workspace_bytes, [model.sizes, model.numbers, sizes], message)
