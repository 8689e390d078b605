"""The masks of a sliding window: both listings of the seed bit for bit, and what they stand for."""

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import as_strided

import lmdecode.reference
from lmdecode import compressed_swa_mask, expand_compressed_swa_mask, swa_mask
from lmdecode.attention import masks
from tests.support.op_contract import WrongCall, assert_refused, wrong_calls

FORMS = ("float", "bool")


def value_of(form: str) -> float:
    return -65536.0 if form == "float" else 1.0


def assert_same_values(got: torch.Tensor, want: np.ndarray, form: str) -> None:
    assert got.dtype == (torch.float32 if form == "float" else torch.bool)
    np.testing.assert_array_equal(got.double().numpy(), want)


# The published listings, in numpy; that in C++ with its own rows, not those of another size.


def python_listing(size: int, window: int, value: float) -> np.ndarray:
    mask = np.ones((size, size)) * value
    return np.triu(mask, 1) + np.tril(mask, -window)


def cpp_listing(size: int, window: int, value: float) -> np.ndarray:
    mask = np.full((size, size), value)
    for i in range(size):
        first = i - window + 1 if i >= window else 0
        mask[i, first : i + 1] = 0.0
    return mask


def python_width(window: int, head_size: int) -> int:
    tile = 128 if head_size <= 128 else 64
    if window <= tile * 3:
        return window
    return tile * 3 if window % tile == 0 else tile * 2 + window % tile


def cpp_width(window: int, head_size: int) -> int:
    tile = 16384 // head_size // 16 * 16 if head_size > 128 else 128
    return 2 * tile + window % tile if window > 3 * tile else window


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [0, 1, 2, 5, 64, 130])
def test_both_listings_are_the_mask(form: str, size: int) -> None:
    for window in sorted({1, 2, 3, 5, 63, 64, 65, size, size + 1, 2**40} - {0}):
        mask = swa_mask(size, window, form=form)
        assert_same_values(mask, python_listing(size, min(window, size + 1), value_of(form)), form)
        assert_same_values(mask, cpp_listing(size, window, value_of(form)), form)


def test_the_example() -> None:
    """Five tokens, a window of three."""
    x = -65536.0
    assert swa_mask(5, 3).tolist() == [
        [0, x, x, x, x], [0, 0, x, x, x], [0, 0, 0, x, x], [x, 0, 0, 0, x], [x, x, 0, 0, 0],
    ]  # fmt: skip
    assert swa_mask(5, 3).half()[0, 1] == -float("inf")
    assert swa_mask(5, 3).bfloat16()[0, 1] == x


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("head_size", [16, 128, 129, 160, 192, 256, 320, 512, 1024])
def test_variants(form: str, head_size: int) -> None:
    edges = {tile * n + d for tile in (16, 32, 64, 128) for n in range(1, 9) for d in (-1, 0, 1)}
    for window in sorted(edges | {1, 2, 333, 1000, 4096}):
        for variant, width, listing in (
            ("python", python_width, python_listing),
            ("cpp", cpp_width, cpp_listing),
        ):
            got = compressed_swa_mask(window, head_size, form=form, variant=variant)
            assert got.shape == (512, 512)
            wanted = listing(512, width(window, head_size), value_of(form))
            assert_same_values(got, wanted, form)


def test_where_the_variants_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every multiple of the tile from four tiles up, and nothing else: 4096 among them."""
    # Their first columns, which differ where the masks do.
    monkeypatch.setattr(masks, "_band", lambda size, width, form: torch.arange(size) >= width)
    differ = [
        window
        for window in range(1, 4097)
        if not torch.equal(
            compressed_swa_mask(window, 128, form="bool", variant="python"),
            compressed_swa_mask(window, 128, form="bool", variant="cpp"),
        )
    ]
    assert differ == list(range(512, 4097, 128))


@pytest.mark.parametrize("head_size", [128, 256])
def test_expanded_it_is_the_mask(head_size: int) -> None:
    """Every window to 2048, at lengths around the edges of tiles."""
    tile = 128 if head_size <= 128 else 64
    key_minus_query = torch.arange(-2047, 2048)
    for window in range(1, 2049):
        mask = compressed_swa_mask(window, head_size, form="bool")
        edge = (window // tile + 2) * tile
        length = min(2048, max(1, edge + (-1, 0, 1, tile // 2)[window % 4]))
        expanded = expand_compressed_swa_mask(mask, length, window, head_size)
        assert expanded.shape == (length, length)
        # Each row of the mask is the one above, moved by a key: all rows lie in one vector.
        row = (key_minus_query > 0) | (key_minus_query <= -window)
        wanted = as_strided(row.numpy()[2047:], (length, length), (-1, 1))
        assert np.array_equal(expanded.numpy(), wanted), window


def test_every_head_size_has_the_mask_of_its_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """So what holds of 128 and 256 for every window holds of all from 64 to 256."""
    mask = compressed_swa_mask(500, 128)
    for same, sizes in ((128, (64, 96)), (256, (129, 192))):
        want = expand_compressed_swa_mask(mask, 700, 500, same)
        for size in sizes:
            assert torch.equal(compressed_swa_mask(500, size), compressed_swa_mask(500, same))
            assert torch.equal(expand_compressed_swa_mask(mask, 700, 500, size), want)
    # Of masks that are not written out, what they are written from.
    monkeypatch.setattr(masks, "_band", lambda *band: band)
    for same, sizes in ((128, range(64, 129)), (256, range(129, 257))):
        bands = [compressed_swa_mask(window, same) for window in range(1, 2049)]
        for size in sizes:
            assert masks.tile_size(size) == masks.tile_size(same)
            assert [compressed_swa_mask(window, size) for window in range(1, 2049)] == bands, size


@pytest.mark.parametrize("head_size", [64, 256])
@pytest.mark.parametrize("form", FORMS)
def test_lengths(head_size: int, form: str) -> None:
    for window in (1, 64, 128, 192, 193, 384, 385, 512, 640, 1000):
        mask = compressed_swa_mask(window, head_size, form=form)
        for length in (0, 1, 63, 64, 65, 127, 128, 129, 383, 512, 513, 700):
            expanded = expand_compressed_swa_mask(mask, length, window, head_size)
            assert torch.equal(expanded, swa_mask(length, window, form=form))
            want = lmdecode.reference.expand_compressed_swa_mask(mask, length, window, head_size)
            assert torch.equal(expanded, want)


def test_attention_by_the_expanded_mask() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 700, 32, generator=generator) for _ in range(3))
    mask = expand_compressed_swa_mask(compressed_swa_mask(512, 32), 700, 512, 32)
    want = lmdecode.sliding_window_attention(q, k, v, window=512)
    assert torch.equal(lmdecode.sliding_window_attention(q, k, v, attn_mask=mask), want)


MASK = torch.zeros(512, 512)
WRONG = [
    ("swa_mask: window is 0; expected", lambda: swa_mask(5, 0)),
    ("swa_mask: window is of type float", lambda: swa_mask(5, 1.0)),
    ("swa_mask: window is of type bool", lambda: swa_mask(5, True)),
    ("swa_mask: seq_len is -1", lambda: swa_mask(-1, 2)),
    ("swa_mask: form is 'int'", lambda: swa_mask(5, 2, form="int")),
    ("swa_mask: window is 18446744073709551616", lambda: swa_mask(5, 2**64)),
    ("compressed_swa_mask: window is 0", lambda: compressed_swa_mask(0, 64)),
    ("compressed_swa_mask: head_size is 0", lambda: compressed_swa_mask(5, 0)),
    ("compressed_swa_mask: form is 'b'", lambda: compressed_swa_mask(5, 64, form="b")),
    ("variant is 'c'; expected None", lambda: compressed_swa_mask(5, 64, variant="c")),
    ("head_size is 1025", lambda: compressed_swa_mask(5, 1025, variant="cpp")),
    ("mask is of type list", lambda: expand_compressed_swa_mask([1], 5, 5, 64)),
    (r"mask has shape \[1, 512, 512\]; expected \[512, 512\]",
     lambda: expand_compressed_swa_mask(MASK[None], 5, 5, 64)),
    ("seq_len is -5", lambda: expand_compressed_swa_mask(MASK, -5, 5, 64)),
]  # fmt: skip


@wrong_calls(WRONG)
def test_errors_name_the_argument(wrong: WrongCall) -> None:
    assert_refused(wrong)
