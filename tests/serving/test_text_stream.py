"""How many characters are held back."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lmdecode.serving.text_stream import held


class Looked(str):
    """A text that counts how often it is looked at."""

    times = 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("endswith", "find"):
            self.times += 1
        return super().__getattribute__(name)


@given(st.text("ab<", max_size=9), st.lists(st.text("ab<", max_size=7), max_size=4))
def test_the_longest_beginning_of_a_word_is_held(text: str, words: list[str]) -> None:
    begun = [n for word in words for n in range(1, len(word)) if text.endswith(word[:n])]
    assert held(text, words) == max(begun, default=0)


def test_a_text_is_looked_at_where_words_may_begin_alone() -> None:
    text = Looked("hello world, this is <")
    assert held(text, ["[TOOL_CALLS]", "<tool_call>", "```python"]) == 1
    assert text.times == 3
