"""What every op keeps, checked from one declaration of the op and tables of calls.

A table of wrong calls has a row for each: a pattern of the message, what is wrong, and the error
where it is neither of these: a TypeError if the message says what type came, otherwise a
ValueError. The pattern names the row in the list of tests.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cases import bits

# A pattern of the message, what is wrong (changes of arguments, or a call), perhaps the error.
WrongCall = tuple[Any, ...]


def wrong_calls(*tables: Sequence[WrongCall]) -> pytest.MarkDecorator:
    """Parametrise a test over the rows of tables, as its argument ``wrong``."""
    rows = [row for table in tables for row in table]
    return pytest.mark.parametrize("wrong", rows, ids=[_id(row[0]) for row in rows])


def _id(pattern: str) -> str:
    """Return the pattern, or the argument alone that one of ``by_argument`` names."""
    named = re.match(r"\(\?=.*?\\b(\w+)\\b", pattern)
    return named[1] if named else pattern


def by_argument(error: type[Exception], bad_values: dict[str, list[Any]]) -> list[WrongCall]:
    """Return a row for each bad value; a dict holds the arguments that are wrong together."""
    return [
        (
            rf"(?=[\s\S]*\b{name}\b)[\s\S]*expected",
            value if isinstance(value, dict) else {name: value},
            error,
        )
        for name, values in bad_values.items()
        for value in values
    ]


def error_of(wrong: WrongCall) -> type[Exception]:
    """Return the error of a wrong call."""
    if isinstance(wrong[-1], type) and issubclass(wrong[-1], Exception):
        return wrong[-1]
    return TypeError if re.search(r"\bof type\b", wrong[0]) else ValueError


def assert_refused(wrong: WrongCall, call: Callable[[], Any] | None = None) -> str:
    """Make the call of a row, or the one given for it: the message has the pattern somewhere."""
    with pytest.raises(error_of(wrong), match=wrong[0]) as raised:
        (call or wrong[1])()
    return str(raised.value)


def assert_op_refuses(
    op: Callable[..., Any], wrong: WrongCall, *given: Any, **options: Any
) -> None:
    """Call an op with a dict of changes, or the wrong value of what the message names first."""
    named = (
        {re.match(r"\w+", wrong[0])[0]: wrong[1]} if not isinstance(wrong[1], dict) else wrong[1]
    )
    arguments = {**dict(enumerate(given)), **options, **named}
    positional = [arguments.pop(number) for number in range(len(given))]
    tensors = list(tensors_of([*positional, *arguments.values()]))
    before = [tensor.clone() for tensor in tensors]
    message = assert_refused(wrong, lambda: op(*positional, **arguments))
    assert message.startswith(f"{op.__name__}: "), message
    for tensor, old in zip(tensors, before, strict=True):
        assert_same_bits(tensor, old)


def tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among values, and in their lists and tuples, that hold something."""
    for value in values:
        if isinstance(value, Tensor):
            if not value.is_meta:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_of(value)


# --- What a result does not depend on -------------------------------------------------------------


def assert_same_bits(got: Any, want: Any) -> None:
    """Raise AssertionError where tensors, alone or in tuples and lists, differ."""
    if isinstance(want, (list, tuple)):
        for one, other in zip(got, want, strict=True):
            assert_same_bits(one, other)
    elif want is None:
        assert got is None
    else:
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        differs = bits(got.contiguous()) != bits(want.contiguous())
        assert not differs.any(), f"{differs.sum()} of {differs.numel()} differ"


def on_threads(call: Callable[[], Any], counts: Sequence[int] = (1, 2, 4)) -> Any:
    """Return what a call returns, on each number of threads with the bits of the first."""
    before = torch.get_num_threads()
    try:
        results = []
        for count in counts:
            torch.set_num_threads(count)
            results.append(call())
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert_same_bits(other, results[0])
    return results[0]
