"""A tokenizer with the layout of Whisper's vocabulary, its words made up."""

import functools

from transformers import AddedToken, WhisperTokenizer
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from tests.decoder.whisper_models import END, FIRST_TIMESTAMP, TIMES


@functools.cache
def whisper_tokenizer() -> WhisperTokenizer:
    """Return one that knows every token of the models of ``whisper_models``."""
    letters = [chr(code) for code in range(33, 127)]
    words = letters + [f"Ġw{number}" for number in range(END - len(letters))]
    vocab = {word: number for number, word in enumerate(words)} | {"<|endoftext|>": END}
    tokenizer = WhisperTokenizer(vocab=vocab, merges=[], pad_token="<|endoftext|>")
    names = ["startoftranscript", *list(LANGUAGES)[:99], "translate", "transcribe", "startoflm"]
    names += ["startofprev", "nospeech", "notimestamps"]
    tokenizer.add_tokens([AddedToken(f"<|{name}|>", special=True) for name in names])
    tokenizer.add_tokens([AddedToken(f"<|{0.02 * i:.2f}|>") for i in range(TIMES)])
    assert tokenizer.convert_tokens_to_ids("<|0.00|>") == FIRST_TIMESTAMP
    return tokenizer
