"""Parts of Whisper's ``generate()`` outside its loop: encoder, language, silence, alignment."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import WhisperNoSpeechDetection
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from lmdecode.decoder.engine.steps import memory_rows
from lmdecode.decoder.searches import DecodingSearches
from lmdecode.integrations.transformers.decoding.encoding import memory_of
from lmdecode.models.packed_stack import PackedDecoder
from lmdecode.readers.transformers.stand_in import ForwardOf, is_stand_in

__all__ = ["CallEncoder", "CallSounds", "NoSpeech", "PromptLogits", "cross_attentions"]


class CallEncoder:
    """The encoder of one call of ``generate()``, which runs once for each window of an audio.

    ``generate()`` encodes the same windows again to detect the language, and for each temperature.
    ``encoder`` takes features, [B, channels, frames].
    """

    def __init__(self, encoder: Any) -> None:
        self._encoder = encoder
        self._known: list[tuple[float, Tensor, Tensor]] = []  # sums, features and memories

    def forward(self, input_features: Tensor, **options: Any) -> Any:
        """Return a ``BaseModelOutput`` without attentions."""
        options.pop("output_attentions", None)  # requested with the decoder's
        options.pop("return_dict", None)
        if any(options.values()) or input_features.dim() != 3:
            return self._encoder(input_features=input_features, **options)
        input_features = input_features.contiguous()  # for the order of the sums
        sums = [float(features.sum()) for features in input_features]
        memories = [self._find(*window) for window in zip(sums, input_features, strict=True)]
        new = list[int]()
        for row, memory in enumerate(memories):
            is_known = memory is not None or any(
                sums[row] == sums[other] and torch.equal(input_features[row], input_features[other])
                for other in new
            )
            if not is_known:
                new.append(row)
        if new:
            windows = input_features if len(new) == len(sums) else input_features[new]
            found = self._encoder(input_features=windows)[0]
            # Keep the windows of earlier calls that this call has again.
            self._known = [known for known in self._known if known[0] in sums]
            for row, memory in zip(new, found, strict=True):
                memories[row] = memory  # a window with NaN is never found again
                self._known.append((sums[row], input_features[row], memory))
            if len(new) == len(sums):
                return BaseModelOutput(last_hidden_state=found)
        rows = [
            self._find(*window) if memory is None else memory
            for window, memory in zip(zip(sums, input_features, strict=True), memories, strict=True)
        ]
        return BaseModelOutput(last_hidden_state=torch.stack(rows))  # type: ignore[arg-type]

    __call__ = forward

    def _find(self, total: float, features: Tensor) -> Tensor | None:
        """Return the memory of a window, [S, M], or None if it is unknown."""
        for known_total, known, memory in self._known:
            if known_total == total and torch.equal(known, features):
                return memory
        return None


def cross_attentions(
    model: Any, sequences: Tensor, memory: Tensor, padding: Tensor | None, num_beams: int
) -> tuple[tuple[Tensor, ...]]:
    """Return the cross-attention weights of generated tokens, by one pass of the decoder.

    The result is a tuple of one step, a tuple of [B * num_beams, heads, length - 1, S] for each
    layer; the beams of an audio get the weights of its one sequence. ``sequences`` is [B, length]
    int64, its last token is not read; ``memory`` is [B, S, M]; ``padding`` is [B * num_beams,
    prompt] bool, True for padding. Raises ValueError if the model, which must have eager attention,
    has no weights.
    """
    if is_stand_in(model.get_decoder()):
        raise ValueError(
            "return_token_timestamps: expected None or False, as decoding.model has no weights for "
            "its own decoder; with Decoding.from_pretrained(..., keep_model=True) it has"
        )
    inputs = sequences[:, :-1]
    options: dict[str, Any] = {}
    if padding is not None:
        seen = ~padding[::num_beams]
        mask = torch.cat([seen, seen.new_ones(len(seen), inputs.shape[1] - seen.shape[1])], dim=1)
        mask = mask.long()
        places = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
        options = {"attention_mask": mask, "position_ids": places}
    found = model.get_decoder()(
        input_ids=inputs,
        encoder_hidden_states=memory.to(model.dtype),
        output_attentions=True,
        use_cache=False,
        **options,
    )
    return (tuple(layer.repeat_interleave(num_beams, 0) for layer in found.cross_attentions),)


class CallSounds:
    """Tracks which sound each row belongs to in one call of Whisper's ``generate()``.

    transformers calls the loop for a window of the sounds that have not ended, and again for those
    whose text was not good enough; its methods that learn which sounds remain record them here.
    Results are kept by a sound's place in the window: transformers takes the row of the loop for
    it, which is another sound once the batch has become smaller. ``model`` is the copy for this
    call.
    """

    def __init__(self, model: Any) -> None:
        self.count = 0
        self._sounds: list[int] = []  # of the window
        self._places: list[int] = []  # in these, of the rows of the loop
        self._again: list[int] = []  # the places that are retried
        self._are_silent: list[bool] = []  # by places, as the next
        self._no_speech: Tensor | None = None
        self._num_beams: int | None = None  # that the call asks for
        self._drawn = set[int]()  # the sounds that have been sampled
        self._generate, self._need_fallback = model.generate_with_fallback, model._need_fallback
        model.generate_with_fallback, model._need_fallback = self._window, self._judge

    def of_rows(self) -> list[int]:
        """Return the sound of each row of the loop that begins."""
        self._begin_loop()
        return [self._sounds[place] for place in self._places]

    def _begin_loop(self) -> None:
        if self._again:
            self._places, self._again = self._again, []

    def _window(self, **options: Any) -> Any:
        """Decode a window of the sounds.

        transformers searches without beams where it has sampled before. So does this method, unless
        another sound was sampled there.
        """
        config, sounds = options["generation_config"], list(options["batch_idx_map"])
        if config.no_speech_threshold is not None and config.logprob_threshold is None:
            raise ValueError(
                f"no_speech_threshold: expected None without a logprob_threshold, got "
                f"{config.no_speech_threshold}: a window is silent by both of them"
            )
        self.count = len(options["seek"])
        self._num_beams = self._num_beams or config.num_beams or 1
        conditions = list(options["do_condition_on_prev_tokens"])
        texts: list[Any] = [None] * len(sounds)
        outputs, are_silent, rest = list(texts), list(texts), list[Any]()
        drawn = self._drawn if self._num_beams > 1 else set[int]()
        for was_drawn in (False, True):
            rows = [row for row, sound in enumerate(sounds) if (sound in drawn) == was_drawn]
            if not rows:
                continue
            self._sounds = [sounds[row] for row in rows]
            self._places, self._again, self._no_speech = list(range(len(rows))), [], None
            self._are_silent = [False] * len(rows)
            config.num_beams = 1 if was_drawn else self._num_beams
            of_rows = options if len(rows) == len(sounds) else _rows_of(options, rows)
            of_rows["do_condition_on_prev_tokens"] = [conditions[i] for i in self._sounds]
            found = self._generate(**{**of_rows, "batch_idx_map": self._sounds})
            for i, row in enumerate(rows):
                texts[row], outputs[row] = found[0][i], found[1][i]
                are_silent[row], conditions[sounds[row]] = self._are_silent[i], found[3][i]
            rest = found[4:]
        return (texts, outputs, are_silent, conditions, *rest)

    def _judge(
        self, sequence: Any, outputs: Any, index: int, processors: Any, *arguments: Any
    ) -> Any:
        if index == 0:
            self._begin_loop()
            kind = WhisperNoSpeechDetection
            detection: Any = next((one for one in processors or () if isinstance(one, kind)), None)
            if detection is not None:
                if self._no_speech is None:  # the first loop has all rows, or beams of them
                    found = detection.no_speech_prob
                    self._no_speech = found[:: len(found) // len(self._places)]
                detection._no_speech_prob = self._no_speech[self._places]
        place = self._places[index]
        needs_fallback, self._are_silent[place] = self._need_fallback(
            sequence, outputs, index, processors, *arguments
        )
        if needs_fallback:
            self._again.append(place)
        if arguments[-1]:  # the temperature
            self._drawn.add(self._sounds[place])
        return needs_fallback, self._are_silent[place]


def _rows_of(options: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """Return arguments of transformers' ``generate_with_fallback`` for some rows of a window."""
    kwargs = dict(options["kwargs"])
    if "decoder_attention_mask" in kwargs:
        kwargs["decoder_attention_mask"] = kwargs["decoder_attention_mask"][rows]
    of_rows = {name: options[name][rows] for name in ("segment_input", "decoder_input_ids")}
    return {**options, **of_rows, "cur_bsz": len(rows), "kwargs": kwargs}


class NoSpeech:
    """Computes the probabilities of ``WhisperNoSpeechDetection`` in the search that follows.

    transformers runs encoder and decoder again for them, if the prompt is longer than one token.
    The ``processor`` receives them. Prompts are [rows, length] int64, ``num_beams`` rows per audio.
    """

    def __init__(
        self, processor: WhisperNoSpeechDetection, input_ids: Tensor, num_beams: int
    ) -> None:
        self._processor: Any = processor
        self._num_beams = num_beams
        self._length = input_ids.shape[1]

    @staticmethod
    def take_from(
        processors: LogitsProcessorList, input_ids: Tensor, num_beams: int
    ) -> tuple[NoSpeech | None, LogitsProcessorList]:
        """Return the detection and the processors without it.

        The detection is None if it must see logits that earlier processors changed.
        """
        kinds = [type(processor) for processor in processors]
        if type(processors) is not LogitsProcessorList:
            return None, processors
        if kinds.count(WhisperNoSpeechDetection) != 1:
            return None, processors
        place = kinds.index(WhisperNoSpeechDetection)
        processor = processors[place]
        if processor.start_of_trans_offset <= 1 and place > 0:
            return None, processors
        left = LogitsProcessorList([*processors[:place], *processors[place + 1 :]])
        return NoSpeech(processor, input_ids, num_beams), left

    def read(self, searches: DecodingSearches) -> None:
        """Read the prompts as far as needed; the search continues from there."""
        processor = self._processor
        if self._length != processor.begin_index:
            return
        offset, place = processor.start_of_trans_offset, self._length - 1
        if offset > 1:
            # Covers all audios, even if only some are retried at another temperature: transformers
            # then indexes all of them, too.
            if getattr(processor, "lmdecode_inputs", None) is processor.inputs:
                return
            processor.lmdecode_inputs = processor.inputs
            place = processor.begin_index - offset
        lengths = dict.fromkeys(range(len(searches.state.done)), place + 1)
        logits = searches.prompt_logits(lengths)[:: self._num_beams]
        if offset <= 1:
            logits = logits.repeat_interleave(self._num_beams, dim=0)
        processor._no_speech_prob = logits.softmax(dim=-1)[:, processor.no_speech_token]


class PromptLogits(ForwardOf):
    """The ``forward`` of a Whisper model on packed weights, for a prompt of one token."""

    def __init__(self, kind: type, encoder: Any, decoder: PackedDecoder) -> None:
        super().__init__(kind)
        self._encoder, self._decoder = encoder, decoder

    def __call__(
        self,
        input_features: Tensor | None = None,
        *,
        encoder_outputs: Any = None,
        decoder_input_ids: Tensor,
        use_cache: bool | None = None,
    ) -> Seq2SeqLMOutput:
        """Return logits [B, 1, V] float32 at [B, 1] tokens; ``use_cache`` has no effect."""
        if encoder_outputs is None:
            encoder_outputs = self._encoder(input_features=input_features)
        memory, lengths = memory_of(encoder_outputs, None)
        rows = memory_rows(self._decoder, memory, lengths, decoder_input_ids.tolist(), 2)
        logits = rows.read_prompts(decoder_input_ids)
        rows.release()
        return Seq2SeqLMOutput(logits=logits[:, None])
