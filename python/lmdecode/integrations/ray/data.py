"""``Generate``, ``Translate`` and ``Transcribe``: classes for ``Dataset.map_batches``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from lmdecode._checks import check_int
from lmdecode.decoder.engine import Engine
from lmdecode.generation_options import option_names
from lmdecode.integrations.ray.models import (
    CAPACITY,
    check_is_causal,
    load_model,
    load_tokenizer,
    positions_of,
)
from lmdecode.integrations.ray.rows import (
    Batch,
    audio_of,
    output_of,
    row_seeds,
    texts_of,
)
from lmdecode.integrations.transformers.decoding.call import engine_call_of
from lmdecode.integrations.transformers.decoding.causal_generation import EngineCall

__all__ = ["Generate", "Transcribe", "Translate"]

_PLACES = 64  # rows that an engine writes at a time
# Arguments of generate() that are the job's, or that return something else than tokens.
_REFUSED = sorted((
    "append", "attention_mask", "custom_generate", "decoder_input_ids", "input_features",
    "input_ids", "inputs", "rewind", "session", "stopping_criteria", "store", "streamer",
    *option_names(job="refused"),
))  # fmt: skip


class _Arguments:
    """The arguments of ``generate()`` that a job is given, beside the model's config."""

    def __init__(self, op: str, model: Any, arguments: dict[str, Any]) -> None:
        for name in _REFUSED:
            if name in arguments:
                raise ValueError(f"{op}: {name} is given; expected none in a job of many rows")
        self.given = arguments
        config = arguments.get("generation_config")
        self._configs = [c for c in (config, model.generation_config) if c is not None]
        rows = self.get("num_return_sequences")
        if rows not in (None, 1):
            raise ValueError(f"{op}: num_return_sequences is {rows}; expected 1, a text a row")
        self.has_beams = (self.get("num_beams") or 1) > 1
        self.draws = bool(self.get("do_sample"))
        if self.has_beams and self.draws:
            raise ValueError(
                f"{op}: do_sample is True with num_beams {self.get('num_beams')}; expected one of "
                "the two: beams that are drawn depend on the rows beside them"
            )

    def get(self, name: str) -> Any:
        """Return the value that ``generate()`` would use for an argument: given, else config."""
        if name in self.given:
            return self.given[name]
        values = (getattr(config, name, None) for config in self._configs)
        return next((value for value in values if value is not None), None)

    @property
    def takes_padding(self) -> bool:
        """Whether rows of several lengths may be padded, and are the same as without."""
        given = set(self.given) - {"generation_config"}
        for config in self._configs:
            given |= {name for name in config.to_diff_dict() if not name.startswith("_")}
        return given <= set(option_names(job="padded"))

    @property
    def ends(self) -> set[int]:
        """The end tokens."""
        ends = self.get("eos_token_id")
        return set(ends if isinstance(ends, (list, tuple)) else [] if ends is None else [ends])


def _up_to_end(tokens: Iterable[int], ends: set[int]) -> list[int]:
    """Return tokens up to the first end token, that included: padding is behind it."""
    found = []
    for token in tokens:
        found.append(token)
        if token in ends:
            break
    return found


class Generate:
    """Text of a decoder-only model behind each prompt: for ``Dataset.map_batches``.

    The column "prompt" (str) comes in. "text" (str) and "tokens" (lists of int64, with the end
    token) go out beside all columns that came. A row has the same text in any batch, at any place
    of it, on any number of actors and after any restart. What is drawn for a row depends on
    ``seed`` and on the row's "id" (int or str), or on its prompt where there is no such column:
    rows of one prompt then have one text.

    Parameters
    ----------
    model : str or PathLike
        A folder that ``Decoding.save`` wrote, which actors of a node share; or the folder or name
        of a model of transformers. A ``Decoding`` is taken, too, where no actor has to be sent it.
    tokenizer
        A folder, a name or the tokenizer itself; by default that of the model's folder.
    max_new_tokens : int, optional
        At most so many tokens; by default as the model's ``generation_config`` says, or else 20.
    seed : int
        Of the job, at least 0; it counts with ``do_sample``.
    dtype : str, optional
        Of a model of transformers, see ``Decoding``.
    **arguments
        Those of ``Decoding.generate``. An ``Engine``, which stays with the actor, writes all rows
        of a batch at a time, and computes the beginnings once that prompts share. With beams, and
        with processors that Python calls, ``Decoding.generate`` does: rows are padded where that
        cannot change them, and are searched by equal lengths otherwise; one by one with
        ``stop_strings`` and ``prompt_lookup_num_tokens``.

    Raises
    ------
    ValueError, TypeError
        Names the argument, or the column and the row, what came and what was expected.
    OSError
        There is no such model or tokenizer.

    Examples
    --------
    ::

        prompts = ray.data.read_parquet("prompts")
        texts = prompts.map_batches(
            Generate,
            fn_constructor_args=["packed"],
            fn_constructor_kwargs={"max_new_tokens": 64, "do_sample": True, "seed": 1},
            batch_size=32,
            concurrency=4,
        )
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        max_new_tokens: int | None = None,
        seed: int = 0,
        dtype: str | None = None,
        **arguments: Any,
    ) -> None:
        op = "Generate"
        self._seed = check_int(op, "seed", seed, 0)
        if max_new_tokens is not None:
            arguments["max_new_tokens"] = check_int(op, "max_new_tokens", max_new_tokens, 1)
        self._decoding = load_model(op, model, dtype)
        check_is_causal(op, self._decoding)
        self._tokenizer = load_tokenizer(op, tokenizer, model)
        self._arguments = _Arguments(op, self._decoding.model, arguments)
        pad, ends = self._arguments.get("pad_token_id"), self._arguments.ends
        self._pad = int(pad) if pad is not None else min(ends, default=0)
        self._engine: Engine | None = None
        self._calls: dict[int, EngineCall | None] = {}  # by the length of a prompt

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch with "text" and "tokens"; ``map_batches`` calls it."""
        prompts = texts_of("Generate", batch, "prompt")
        contents = [prompt.encode(errors="surrogatepass") for prompt in prompts]
        seeds = row_seeds("Generate", self._seed, batch, contents)
        ids = [self._tokenizer(prompt).input_ids for prompt in prompts]
        for row, tokens in enumerate(ids):
            if not tokens:
                raise ValueError(
                    f"Generate: column 'prompt', row {row} of the batch, is {prompts[row]!r}; "
                    "expected a text of at least one token"
                )
        found = self._write(ids, seeds)
        left = {row: len(prompt) for row, prompt in enumerate(ids) if row not in found}
        for rows in self._groups(left):
            texts = self._generate([ids[row] for row in rows], [seeds[row] for row in rows])
            found.update(zip(rows, texts, strict=True))
        tokens = [found[row] for row in range(len(ids))]
        return output_of(
            batch, self._tokenizer.batch_decode(tokens, skip_special_tokens=True), tokens
        )

    def _write(self, ids: list[list[int]], seeds: list[int]) -> dict[int, list[int]]:
        """Return the texts that an engine can write, by row."""
        asked = {row: call for row, prompt in enumerate(ids) if (call := self._asked(prompt))}
        if not asked:
            return {}
        longest = max(len(ids[row]) + call.max_new_tokens for row, call in asked.items())
        if self._engine is None or longest > self._engine.capacity + 1:
            capacity = max(longest - 1, min(positions_of(self._decoding), CAPACITY))
            self._engine = self._decoding.engine(max_requests=_PLACES, capacity=capacity)
        requests = {
            row: call.submit(self._engine, ids[row], seeds[row]) for row, call in asked.items()
        }
        try:
            return {row: request.result().tokens for row, request in requests.items()}
        except BaseException:
            for request in requests.values():
                request.cancel()
            raise

    def _asked(self, prompt: list[int]) -> EngineCall | None:
        """Return the engine call for this prompt; None if only ``generate()`` can do it."""
        length = len(prompt)
        if length not in self._calls:
            options = {"pad_token_id": self._pad, **self._arguments.given}
            if self._arguments.get("stop_strings") is not None:
                options["tokenizer"] = self._tokenizer
            self._calls[length] = engine_call_of(self._decoding, prompt, options)
        return self._calls[length]

    def _groups(self, lengths: dict[int, int]) -> Iterator[list[int]]:
        """Yield the rows that are generated in one call, of all rows with their lengths."""
        if any(self._arguments.get(name) is not None for name in option_names(job="row by row")):
            yield from ([row] for row in lengths)
        elif self._arguments.takes_padding:
            yield from [list(lengths)] if lengths else []
        else:
            for _, group in groupby(sorted(lengths, key=lengths.__getitem__), lengths.__getitem__):
                yield list(group)

    def _generate(self, prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        length = max(map(len, prompts))
        input_ids = torch.full((len(prompts), length), self._pad, device="cpu")
        mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            input_ids[row, length - len(prompt) :] = torch.tensor(prompt, device="cpu")
            mask[row, length - len(prompt) :] = 1
        options = {"pad_token_id": self._pad, **self._arguments.given}
        if self._arguments.get("stop_strings") is not None:
            options["tokenizer"] = self._tokenizer
        if self._arguments.draws:
            options["seed"] = torch.tensor(seeds, device="cpu")
        output: Tensor = self._decoding.generate(input_ids, attention_mask=mask, **options)
        ends = self._arguments.ends
        return [_up_to_end(row, ends) for row in output[:, length:].tolist()]


class Translate:
    """The output of an encoder-decoder model for each text: for ``Dataset.map_batches``.

    The column "source" (str) comes in. "text" (str) and "tokens" (lists of int64, with the end
    token) go out beside all columns that came. A row has the same text in any batch, on any number
    of actors and after any restart: nothing is drawn.

    Parameters
    ----------
    model, tokenizer, dtype
        As of ``Generate``.
    **arguments
        Those of ``Decoding.translate``, as ``num_beams``, ``max_new_tokens`` and
        ``forced_bos_token_id``.

    Raises
    ------
    ValueError, TypeError
        Names the argument, or the column and the row, what came and what was expected.
    OSError
        There is no such model or tokenizer.
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, *, dtype: str | None = None, **arguments: Any
    ) -> None:
        op = "Translate"
        for name in ("attention_mask", "num_return_sequences", "sources"):
            if name in arguments:
                raise ValueError(f"{op}: {name} is given; expected none in a job of many rows")
        self._decoding = load_model(op, model, dtype)
        self._tokenizer = load_tokenizer(op, tokenizer, model)
        self._arguments = arguments
        self._decoding.translate([], **arguments)  # what it refuses, it refuses now

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch with "text" and "tokens"; ``map_batches`` calls it."""
        sources = texts_of("Translate", batch, "source")
        ids = [self._tokenizer(source).input_ids for source in sources]
        results = self._decoding.translate(ids, **self._arguments)
        tokens = [result.new_tokens() for result in results]
        return output_of(
            batch, self._tokenizer.batch_decode(tokens, skip_special_tokens=True), tokens
        )


class Transcribe:
    """The text of each sound, by a Whisper: for ``Dataset.map_batches``.

    The column "audio" comes in: arrays [samples] of floats at 16 kHz, or dicts of "array" and
    "sampling_rate", as data sets of speech have them. "text" (str) and "tokens" (lists of int64,
    without the end token) go out beside all columns that came. A row has the same text in any
    batch, on any number of actors and after any restart. Sounds longer than a window of the model
    (30 seconds) are read window by window, a row at a time.

    Parameters
    ----------
    model, dtype
        As of ``Generate``; a Whisper.
    processor
        A folder, a name or the processor itself: tokenizer and feature extractor; by default that
        of the model's folder.
    seed : int
        As of ``Generate``; it counts with a ``temperature`` above 0, at which Whisper draws.
    **arguments
        Those of ``Decoding.generate``, as ``language``, ``task`` and ``num_beams``.

    Raises
    ------
    ValueError, TypeError
        Names the argument, or the column and the row, what came and what was expected.
    OSError
        There is no such model or processor.
    """

    def __init__(
        self,
        model: Any,
        processor: Any = None,
        *,
        seed: int = 0,
        dtype: str | None = None,
        **arguments: Any,
    ) -> None:
        op = "Transcribe"
        self._seed = check_int(op, "seed", seed, 0)
        self._decoding = load_model(op, model, dtype)
        if not hasattr(self._decoding.model, "detect_language"):
            kind = self._decoding.model.config.model_type
            raise ValueError(f"{op}: model is a {kind!r}; expected a Whisper")
        self._processor = load_tokenizer(op, processor, model, is_processor=True)
        for part in ("feature_extractor", "tokenizer"):
            if not hasattr(self._processor, part):
                raise ValueError(
                    f"{op}: processor is a {type(self._processor).__name__} without {part}; "
                    "expected a processor of Whisper"
                )
        temperature = arguments.get("temperature")
        if isinstance(temperature, (list, tuple)) and len(temperature) > 1:
            raise ValueError(
                f"{op}: temperature is {temperature!r}; expected one number: where one temperature "
                "follows another, what is drawn depends on the rows beside"
            )
        self._arguments = _Arguments(op, self._decoding.model, arguments)
        # Whisper's generate() draws at a temperature, whatever do_sample says.
        self._draws = self._arguments.draws or bool(temperature)

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch with "text" and "tokens"; ``map_batches`` calls it."""
        sounds = audio_of("Transcribe", batch, "audio")
        seeds = row_seeds("Transcribe", self._seed, batch, [sound.tobytes() for sound in sounds])
        window = self._processor.feature_extractor.n_samples
        found: list[list[int]] = [[] for _ in sounds]
        short = [row for row, sound in enumerate(sounds) if len(sound) <= window]
        if short:
            # Each by itself: what is computed of a batch at once may differ in the last bits.
            features = torch.cat([self._features(sounds[row]) for row in short])
            options = {}
            if self._draws:
                options["seed"] = torch.tensor([seeds[row] for row in short], device="cpu")
            for row, tokens in zip(short, self._tokens(features, **options), strict=True):
                found[row] = tokens
        for row, sound in enumerate(sounds):
            if len(sound) > window:
                found[row] = self._long(sound, seeds[row])
        texts = self._processor.tokenizer.batch_decode(found, skip_special_tokens=True)
        return output_of(batch, texts, found)

    def _features(self, sound: Any, **options: Any) -> Any:
        inputs = self._processor.feature_extractor(
            sound, sampling_rate=16_000, return_tensors="pt", **options
        )
        return inputs if options else inputs.input_features

    def _tokens(self, features: Tensor, **options: Any) -> list[list[int]]:
        given = self._arguments.given
        output = self._decoding.generate(input_features=features, **given, **options)
        return [self._without_end(row) for row in output.tolist()]

    def _without_end(self, tokens: list[int]) -> list[int]:
        # As Whisper's generate() has it for a row alone; in a batch padding shows it.
        ends = self._arguments.ends
        return [token for token in _up_to_end(tokens, ends) if token not in ends]

    def _long(self, sound: Any, seed: int) -> list[int]:
        if self._arguments.draws:
            raise ValueError(
                f"Transcribe: do_sample is True for a sound of {len(sound)} samples; expected "
                "False for sounds of several windows"
            )
        inputs = self._features(
            sound, truncation=False, padding="longest", return_attention_mask=True
        )
        options = {"return_timestamps": True, **self._arguments.given}
        if self._draws:
            options["seed"] = torch.tensor([seed], device="cpu")
        output = self._decoding.generate(
            input_features=inputs.input_features, attention_mask=inputs.attention_mask, **options
        )
        return self._without_end(output[0].tolist())
