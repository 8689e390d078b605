"""Every public integer takes what converts to an integer, with the result of the int itself."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import lmdecode
from lmdecode._checks import is_int

_RNG = np.random.default_rng(7)
_LOGITS = torch.from_numpy(_RNG.standard_normal((6, 11), dtype=np.float32))
_STATES = torch.from_numpy(_RNG.standard_normal((2, 3, 5, 4), dtype=np.float32))
_OTHERS = (np.int64, np.int32, np.array, torch.tensor)


class _Index:
    """Has ``__index__`` alone."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def _table(**changed: Any) -> lmdecode.BlockTable:
    sizes = {"num_blocks": 9, "max_rows": 4, "max_blocks_per_row": 3, "block_size": 4}
    return lmdecode.BlockTable(**(sizes | changed))


def _held(table: lmdecode.BlockTable) -> object:
    return {name: value for name, value in vars(table).items() if name != "_copies"}  # scratch


def _filled(table: lmdecode.BlockTable, call: Callable[[lmdecode.BlockTable], object]) -> object:
    table.insert(6, 2)
    result = call(table)
    return _held(table), result


def _ring(**changed: Any) -> dict[str, object]:
    sizes = {"batch": 2, "num_kv_heads": 3, "head_size": 4, "window": 2, "capacity": 3}
    ring = lmdecode.RingKVCache(**(sizes | {"num_sink_tokens": 1, "value_size": 4} | changed))
    ring._keys.zero_()
    ring._values.zero_()
    return vars(ring)


def _after(call: Callable[[lmdecode.RingKVCache], object], **changed: Any) -> object:
    ring = lmdecode.RingKVCache(2, 3, 4, 2, capacity=5)
    ring._keys.zero_()
    ring._values.zero_()
    ring.append(_STATES, _STATES)
    result = call(ring)
    return vars(ring), result


def _ring_append(**changed: Any) -> object:
    keys, values = torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4, 4)
    lmdecode.ring_cache_append_(
        keys, values, _STATES, _STATES, **({"position": 2, "num_sink_tokens": 1} | changed)
    )
    return keys, values


def _index(call: Callable[[lmdecode.BeamIndirection], object]) -> object:
    index = lmdecode.BeamIndirection(4, 6)
    return call(index), index.table, index.lengths


def _top_k(**changed: Any) -> object:
    arguments = {"num_candidates": 3, "num_beams": 2} | changed
    return lmdecode.log_softmax_top_k(_LOGITS, torch.zeros(6), **arguments)


def _step(rows: Any) -> object:
    state = lmdecode.new_beam_state(2, 2, 4)
    parameters = lmdecode.beam_parameters(2, 2, max_lengths=4)
    found = lmdecode.log_softmax_top_k(_LOGITS[:4], state.scores, 4, num_beams=2)
    return lmdecode.beam_step(state, parameters, *found[:3], rows=rows), state


def _final(**changed: Any) -> object:
    state = lmdecode.new_beam_state(2, 2, 4)
    arguments = {"num_return_sequences": 1, "num_groups": 2} | changed
    return lmdecode.beam_finalize(state, lmdecode.beam_parameters(2, 2), **arguments)


def _config(**changed: Any) -> object:
    sizes = dict.fromkeys(
        ("num_layers", "model_size", "num_heads", "head_size", "ffn_size", "vocab_size"), 3
    )
    return vars(lmdecode.DecoderConfig(**(sizes | changed)))


def _tree(end_token: Any) -> object:
    steps = torch.tensor([[[3, 4]], [[5, 6]]])
    return lmdecode.gather_tree(steps, torch.zeros_like(steps), torch.tensor([2]), end_token)


def _reorder(**changed: Any) -> object:
    states = _STATES.clone()
    lmdecode.reorder_cache_([states], torch.tensor([1, 0]), **({"length_dim": 2} | changed))
    return states


def _state(**changed: Any) -> object:
    sizes = {"slots": 2, "num_beams": 2, "capacity": 3, "num_hypotheses": 2}
    return lmdecode.new_beam_state(**(sizes | changed))


#: Name, an int, and what is done with it.
_ARGUMENTS: dict[str, tuple[int, Callable[[Any], object]]] = {
    "BlockTable.num_blocks": (8, lambda n: _held(_table(num_blocks=n))),
    "BlockTable.max_rows": (3, lambda n: _held(_table(max_rows=n))),
    "BlockTable.max_blocks_per_row": (2, lambda n: _held(_table(max_blocks_per_row=n))),
    "BlockTable.block_size": (2, lambda n: _held(_table(block_size=n))),
    "insert.length": (5, lambda n: _filled(_table(), lambda t: t.insert(n))),
    "insert.num_beams": (2, lambda n: _filled(_table(), lambda t: t.insert(4, n))),
    "append.num_tokens": (2, lambda n: _filled(_table(), lambda t: t.append(n))),
    "slots.row": (1, lambda n: _filled(_table(), lambda t: t.slots(n))),
    "slots.start": (1, lambda n: _filled(_table(), lambda t: t.slots(0, n))),
    "slots.stop": (3, lambda n: _filled(_table(), lambda t: t.slots(0, 0, n))),
    "free.rows": (1, lambda n: _filled(_table(), lambda t: t.free([n]))),
    "gather.length": (5,
                      lambda n: _filled(_table(), lambda t: t.gather(torch.ones(9, 1, 4, 2), n))),
    "swa_mask.seq_len": (5, lambda n: lmdecode.swa_mask(n, 2)),
    "swa_mask.window": (2, lambda n: lmdecode.swa_mask(5, n)),
    "compressed_swa_mask.window": (9, lambda n: lmdecode.compressed_swa_mask(n, 64)),
    "compressed_swa_mask.head_size": (256, lambda n: lmdecode.compressed_swa_mask(9, n)),
    "expand_compressed_swa_mask.seq_len": (
        7,
        lambda n: lmdecode.expand_compressed_swa_mask(torch.ones(512, 512), n, 3, 64),
    ),
    "expand_compressed_swa_mask.window": (
        3,
        lambda n: lmdecode.expand_compressed_swa_mask(torch.ones(512, 512), 7, n, 64),
    ),
    "expand_compressed_swa_mask.head_size": (
        64,
        lambda n: lmdecode.expand_compressed_swa_mask(torch.ones(512, 512), 7, 3, n),
    ),
    "RingKVCache.batch": (3, lambda n: _ring(batch=n)),
    "RingKVCache.num_kv_heads": (2, lambda n: _ring(num_kv_heads=n)),
    "RingKVCache.head_size": (2, lambda n: _ring(head_size=n)),
    "RingKVCache.window": (2, lambda n: _ring(window=n, capacity=None)),
    "RingKVCache.capacity": (4, lambda n: _ring(capacity=n)),
    "RingKVCache.num_sink_tokens": (2, lambda n: _ring(num_sink_tokens=n)),
    "RingKVCache.value_size": (2, lambda n: _ring(value_size=n)),
    "rollback.num_tokens": (1, lambda n: _after(lambda r: r.rollback(n))),
    "ordered.length": (3, lambda n: _after(lambda r: r.ordered(n))),
    "restore.num_tokens": (
        5,
        lambda n: _after(lambda r: r.restore(r.snapshot()._replace(num_tokens=n))),
    ),
    "ring_cache_append_.num_sink_tokens": (1, lambda n: _ring_append(num_sink_tokens=n)),
    "gather_indirect.length": (
        2,
        lambda n: lmdecode.gather_indirect(_STATES, torch.zeros(2, 5, dtype=torch.int32), n),
    ),
    "BeamIndirection.rows": (3, lambda n: lmdecode.BeamIndirection(n, 4).table),
    "BeamIndirection.capacity": (3, lambda n: lmdecode.BeamIndirection(4, n).table),
    "begin.rows": (2, lambda n: _index(lambda i: i.begin([n], 0, 3))),
    "begin.prompt_row": (1, lambda n: _index(lambda i: i.begin([2], n, 3))),
    "begin.length": (3, lambda n: _index(lambda i: i.begin([2], 0, n))),
    "advance.num_tokens": (2, lambda n: _index(lambda i: i.advance(n))),
    "reorder_cache_.batch_dim": (0, lambda n: _reorder(batch_dim=n, length=2)),
    "reorder_cache_.length_dim": (2, lambda n: _reorder(length_dim=n, length=2)),
    "reorder_cache_.length": (2, lambda n: _reorder(length=n)),
    "log_softmax_top_k.num_candidates": (3, lambda n: _top_k(num_candidates=n)),
    "beam_step.rows": (4, _step),
    "beam_finalize.num_return_sequences": (2, lambda n: _final(num_return_sequences=n)),
    "beam_finalize.num_groups": (1, lambda n: _final(num_groups=n)),
    "new_beam_state.slots": (3, lambda n: _state(slots=n)),
    "new_beam_state.num_beams": (3, lambda n: _state(num_beams=n)),
    "new_beam_state.capacity": (4, lambda n: _state(capacity=n)),
    "new_beam_state.num_hypotheses": (3, lambda n: _state(num_hypotheses=n)),
    "beam_parameters.num_beams": (3, lambda n: lmdecode.beam_parameters(2, n)),
    "beam_parameters.end_tokens": (3, lambda n: lmdecode.beam_parameters(2, 2, end_tokens=n)),
    "BeamRequest.num_beams": (
        3,
        lambda n: lmdecode.BeamRequest([1], max_new_tokens=2, num_beams=n).num_beams,
    ),
    "BeamSearch.capacity": (7, lambda n: vars(lmdecode.BeamSearch(9, capacity=n)._store)),
    "BeamSearch.vocab_size": (7, lambda n: lmdecode.BeamSearch(n)._vocab_size),
    "DecoderConfig.head_size": (4, lambda n: _config(head_size=n)),
    "gather_tree.end_token": (5, _tree),
    "prompt_lookup.num_tokens": (2, lambda n: lmdecode.prompt_lookup(torch.arange(9) % 4, n)),
    "prompt_lookup.max_ngram": (2, lambda n: lmdecode.prompt_lookup(torch.arange(9) % 4, 3, n)),
}  # fmt: skip


def _assert_same(given: object, expected: object) -> None:
    assert type(given) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert isinstance(given, torch.Tensor)
        torch.testing.assert_close(given, expected, rtol=0, atol=0, equal_nan=True)
    elif isinstance(expected, dict):
        assert isinstance(given, dict)
        _assert_same(list(given.values()), list(expected.values()))
    elif isinstance(expected, (tuple, list)):
        assert isinstance(given, (tuple, list))
        for one, other in zip(given, expected, strict=True):
            _assert_same(one, other)
    elif isinstance(expected, (int, float, str, range, torch.device, type(None))):
        assert given == expected


@pytest.mark.parametrize("kind", [*_OTHERS, _Index], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", _ARGUMENTS)
def test_every_integer_has_the_result_of_the_int(name: str, kind: Callable[[int], Any]) -> None:
    number, call = _ARGUMENTS[name]
    if name == "rollback.num_tokens" and kind is torch.tensor:
        with pytest.raises(TypeError, match="rollback: num_tokens is of type Tensor"):
            call(kind(number))
        return
    _assert_same(call(kind(number)), call(number))


@pytest.mark.parametrize("kind", [np.int64, np.array, _Index], ids=lambda kind: kind.__name__)
def test_number_of_beams_for_all_requests(kind: Callable[[int], Any]) -> None:
    # A tensor holds one for each request instead.
    _assert_same(_top_k(num_beams=kind(2)), _top_k(num_beams=2))
    _assert_same(_top_k(num_beams=[kind(2)] * 3), _top_k(num_beams=[2] * 3))


@pytest.mark.parametrize("kind", _OTHERS, ids=lambda kind: kind.__name__)
def test_ring_smaller_than_its_window_is_refused_as_any_integer(kind: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="capacity is 2; expected at least 8, the window"):
        lmdecode.RingKVCache(1, 1, 4, 8, capacity=kind(2))


@pytest.mark.parametrize("kind", [np.float32, np.float64], ids=lambda kind: kind.__name__)
def test_numbers_of_numpy_have_the_result_of_the_float(kind: Callable[[float], Any]) -> None:
    _assert_same(_config(norm_epsilon=kind(0.5)), _config(norm_epsilon=0.5))
    x = torch.arange(8.0).view(2, 4)
    _assert_same(lmdecode.rms_norm(x, eps=kind(0.5)), lmdecode.rms_norm(x, eps=0.5))


@pytest.mark.parametrize(
    "value",
    [True, np.bool_(True), np.array(True), torch.tensor(True), torch.tensor(1.0), 1.0,
     np.float64(1), np.array(1.0), "1", None, [1], np.array([1, 2])],
    ids=repr,
)  # fmt: skip
def test_what_is_no_integer(value: object) -> None:
    assert not is_int(value)
