"""The reader of ``model.bin``: what it reads, and files that are damaged or lie."""

import random
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from lmdecode.formats.ctranslate2 import ModelFile
from tests.readers.ctranslate2.model_files import model_file, text, variable

_RANDOM = torch.Generator().manual_seed(0)
WEIGHTS = {
    "a/weight": torch.randint(-127, 128, (4, 6), generator=_RANDOM, dtype=torch.int8),
    "a/weight_scale": torch.rand(4, generator=_RANDOM) * 50 + 1,
    "b": torch.randn(3, 2, generator=_RANDOM).half(),
    "c": torch.randn(5, generator=_RANDOM).bfloat16(),
    "conv/weight": torch.randint(-127, 128, (2, 3, 3), generator=_RANDOM, dtype=torch.int8),
    "conv/weight_scale": torch.tensor([3.0, 7.0]),
    "d": torch.randn(7, generator=_RANDOM),
    "number": torch.tensor(8, dtype=torch.int16),
    "wide/weight": torch.randint(-1024, 1024, (4, 6), generator=_RANDOM, dtype=torch.int16),
    "wide/weight_scale": torch.tensor(12.5),
}
WHOLE = model_file(WEIGHTS, {"e/weight": "a/weight", "f": "e/weight"})


def written(folder: Path, data: bytes) -> Path:
    path = folder / "model.bin"
    path.write_bytes(data)
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = ModelFile(written(tmp_path, WHOLE))
    assert (file.spec, file.revision) == ("TransformerSpec", 7)
    assert file.variables.keys() == WEIGHTS.keys()
    for name, value in WEIGHTS.items():
        got = file.read(name)
        assert got.dtype == value.dtype and torch.equal(got, value)
        assert got.data_ptr() % got.itemsize == 0
    assert file.aliases == {"e/weight": "a/weight", "f": "a/weight"}
    assert torch.equal(file.read("f"), WEIGHTS["a/weight"])
    assert file.shape("e/weight") == (4, 6)


@pytest.mark.parametrize("name", ["a/weight", "conv/weight", "wide/weight"])
def test_integers_are_divided_by_their_scales_as_ctranslate2_does(
    name: str, tmp_path: Path
) -> None:
    file = ModelFile(written(tmp_path, WHOLE))
    values, scale = WEIGHTS[name].numpy(), WEIGHTS[f"{name}_scale"].numpy().reshape(-1)
    expected = np.empty(values.shape, np.float32)
    for i, row in enumerate(values):
        reciprocal = np.float32(1) / scale[i if len(scale) > 1 else 0]
        expected[i] = row.astype(np.float32) * reciprocal
    assert np.array_equal(file.weights(name).numpy(), expected)
    assert torch.equal(file.weights("b"), WEIGHTS["b"])  # floats stay as they are


def test_an_alias_has_the_scale_of_its_variable(tmp_path: Path) -> None:
    file = ModelFile(written(tmp_path, WHOLE))
    assert torch.equal(file.weights("e/weight"), file.weights("a/weight"))


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5])
def test_older_versions(version: int, tmp_path: Path) -> None:
    """Before 4 a dtype is told by its size; before 3 there are no aliases, before 2 no names."""
    weights = {"d": WEIGHTS["d"], "wide": WEIGHTS["wide/weight"], "small": WEIGHTS["a/weight"]}
    aliases = {"e": "d"} if version >= 3 else {}
    file = ModelFile(written(tmp_path, model_file(weights, aliases, version=version)))
    assert file.spec == ("TransformerSpec" if version >= 2 else "")
    assert file.aliases == aliases
    for name, value in weights.items():
        assert torch.equal(file.read(name), value)


HEAD = struct.pack("<I", 6) + text("TransformerSpec") + struct.pack("<I", 7)
ONE, HUGE = struct.pack("<I", 1), 0xFFFFFFFF
VALUE = torch.ones(2, 3)
NONE = struct.pack("<I", 0)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "is empty"),
    "three bytes": (b"\6\0\0", "ends within its version: 4 bytes from 0, 3 are there"),
    "version 0": (b"\0" * 64, r"is of version 0, and 1 to 6 are read"),
    "version 7": (struct.pack("<I", 7) + b"\0" * 9, r"is of version 7"),
    "another format": (b"GGUF" + b"\0" * 64, r"is of version 1179993927"),
    "a name beyond the end": (
        HEAD[:4] + struct.pack("<H", 0xFFFF) + b"abc", "ends within the name of its kind: 65535",
    ),
    "a name of no bytes": (HEAD[:4] + b"\0\0" * 9, "no zero at the end of the name of its kind"),
    "a name without a zero": (
        HEAD + ONE + struct.pack("<H", 3) + b"abc" + b"\0" * 20,
        "no zero at the end of the name of variable 0",
    ),
    "a name with a zero within": (
        HEAD + ONE + struct.pack("<H", 4) + b"a\0c\0" + b"\0" * 20, "no zero at the end",
    ),
    "a name that is no text": (
        HEAD + ONE + struct.pack("<H", 3) + b"\xff\xfe\0" + b"\0" * 20, "that are no UTF-8",
    ),
    "an empty name": (HEAD + ONE + variable("", VALUE) + NONE, "has nothing for the name"),
    "a name twice": (
        HEAD + struct.pack("<I", 2) + variable("a", VALUE) * 2 + NONE, "has 'a' twice",
    ),
    "four thousand million variables": (
        HEAD + struct.pack("<I", HUGE) + variable("a", VALUE),
        "ends within the length of the name of variable 1",
    ),
    "a rank of 255": (HEAD + ONE + text("a") + b"\xff" + b"\1" * 40, "ends within the shape of"),
    "a huge shape": (
        HEAD + ONE + variable("a", VALUE, shape=[HUGE] * 4) + NONE, "with 24 bytes for shape",
    ),
    "a huge shape with the size to it": (
        HEAD + ONE + variable("a", VALUE, shape=[1 << 15, 1 << 14], size=1 << 31) + NONE,
        "ends within 'a': 2147483648 bytes",
    ),
    "a shape with a zero": (
        HEAD + ONE + variable("a", torch.ones(0, 3)) + NONE, "with 0 bytes for shape",
    ),
    "a size that is too small": (
        HEAD + ONE + variable("a", VALUE, size=20) + NONE, "with 20 bytes for shape",
    ),
    "a dtype that there is not": (
        HEAD + ONE + variable("a", VALUE, kind=6) + NONE, "with a dtype of number 6",
    ),
    "elements of 3 bytes": (
        struct.pack("<I", 3) + HEAD[4:] + ONE
        + variable("a", VALUE, version=3, kind=3) + NONE, "with a dtype of number 3",
    ),
    "no aliases' count": (HEAD + ONE + variable("a", VALUE), "within the count of its aliases"),
    "four thousand million aliases": (
        HEAD + ONE + variable("a", VALUE) + struct.pack("<I", HUGE), "ends within the length of",
    ),
    "an alias of nothing": (model_file({"a": VALUE}, {"b": "c"}), "'b' stand for 'c', which is"),
    "an alias of itself": (model_file({"a": VALUE}, {"b": "b"}), "'b' stand for 'b', which is"),
    "a circle of aliases": (
        model_file({"a": VALUE}, {"b": "c", "c": "b"}), "'b' stand for 'c', which is not there",
    ),
    "an alias by a variable's name": (model_file({"a": VALUE}, {"a": "a"}), "has 'a' twice"),
    "bytes behind the end": (WHOLE + b"\0", f"has 1 bytes behind its end at {len(WHOLE)}"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file(case: str, tmp_path: Path) -> None:
    data, what = HOSTILE[case]
    path = written(tmp_path, data)
    tracemalloc.start()
    with pytest.raises(ValueError, match=what) as error:
        ModelFile(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(error.value).startswith(str(path))
    assert peak < 8 << 20  # nothing is allocated because a file says so


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    for size in range(len(WHOLE)):
        path = written(tmp_path, WHOLE[:size])
        with pytest.raises(ValueError, match=r"model\.bin (ends within|is empty)"):
            ModelFile(path)


def test_mutations_are_errors_or_other_values(tmp_path: Path) -> None:
    """Of whatever bytes a file is: ValueError, or tensors that lie within it."""
    randomness, refused = random.Random(5), 0
    for _ in range(600):
        data = bytearray(WHOLE)
        for _ in range(randomness.choice((1, 1, 2, 5))):
            if randomness.random() < 0.3:
                at = randomness.randrange(len(data) - 4)
                data[at : at + 4] = randomness.choice((b"\xff" * 4, b"\0" * 4, b"\0\0\0\x80"))
            else:
                data[randomness.randrange(len(data))] = randomness.randrange(256)
        path = written(tmp_path, bytes(data))
        try:
            file = ModelFile(path)
        except ValueError as error:
            assert str(error).startswith(str(path))
            refused += 1
            continue
        for name, (_, _, begin, size) in file.variables.items():
            assert 0 < begin < begin + size <= len(data)
            assert file.read(name).nbytes == size
            try:
                file.weights(name)
            except ValueError as error:
                assert str(path) in str(error)
    assert 100 < refused < 600


@pytest.mark.parametrize(
    ("weights", "what"),
    [
        ({"a": WEIGHTS["a/weight"]}, "in torch.int8; expected floats, or int8 or int16 with a"),
        ({"a": torch.ones(2, 2, dtype=torch.int32), "a_scale": torch.ones(2)}, "in torch.int32"),
        ({"a": WEIGHTS["a/weight"], "a_scale": torch.ones(3)}, r"a scale of shape \[3\]; .* 1 or"),
        ({"a": WEIGHTS["a/weight"], "a_scale": torch.tensor([1.0, 0, 1, 1])}, "finite values"),
        ({"a": WEIGHTS["a/weight"], "a_scale": torch.full((4,), torch.inf)}, "finite values"),
        ({"a": WEIGHTS["a/weight"], "a_scale": torch.full((4,), torch.nan)}, "finite values"),
        ({"a": WEIGHTS["a/weight"], "a_scale": torch.ones(4), "a_zero": torch.ones(4)},
         "expected floats, or int8"),
    ],
)  # fmt: skip
def test_scales_that_are_none(weights: dict[str, torch.Tensor], what: str, tmp_path: Path) -> None:
    file = ModelFile(written(tmp_path, model_file(weights)))
    with pytest.raises(ValueError, match=what):
        file.weights("a")


def test_a_name_that_is_not_there(tmp_path: Path) -> None:
    path = written(tmp_path, WHOLE)
    with pytest.raises(ValueError, match=r"model\.bin has no variable 'x'"):
        ModelFile(path).read("x")
    with pytest.raises(FileNotFoundError):
        ModelFile(tmp_path / "other.bin")
