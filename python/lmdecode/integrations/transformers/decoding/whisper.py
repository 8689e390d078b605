"""Parts of Whisper's ``generate()`` outside its loop: encoder, language, alignment."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from lmdecode.integrations.transformers.stand_in import is_stand_in

__all__ = ["CallEncoder", "CallSounds", "cross_attentions"]


class CallEncoder:
    """The encoder of one call of ``generate()``, which runs once for each window of an audio.

    ``generate()`` encodes the same windows again to detect the language, and for each temperature.

    Parameters
    ----------
    encoder
        Takes features, [B, channels, frames].
    """

    def __init__(self, encoder: Any) -> None:
        self._encoder = encoder
        self._known: list[tuple[float, Tensor, Tensor]] = []  # sums, features and memories

    def forward(self, input_features: Tensor, **options: Any) -> Any:
        """Return a ``BaseModelOutput`` without attentions."""
        options.pop("output_attentions", None)  # requested with those of the decoder
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

    Parameters
    ----------
    model
        A Whisper model with eager attention.
    sequences : Tensor
        [B, length] int64; the last token is not read.
    memory : Tensor
        [B, S, M].
    padding : Tensor, optional
        [B * num_beams, prompt] bool: True where the prompts are padding.
    num_beams
        Beams per audio. Each gets the attentions of the audio's sequence.

    Returns
    -------
    tuple of one tuple of Tensor
        One step, with [B * num_beams, heads, length - 1, S] for each layer.

    Raises
    ------
    ValueError
        The model has no weights.
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
    """The sounds that the rows of one call of Whisper's ``generate()`` are of.

    It calls that of transformers for a window of the sounds that are not yet at their end, and
    again for those whose text was not good enough. Its methods that are asked which these are note
    it here.

    Parameters
    ----------
    model
        The copy of the model for this call.

    Attributes
    ----------
    count : int
        Number of sounds of the call.
    """

    def __init__(self, model: Any) -> None:
        self.count = 0
        self._rows: list[int] = []
        self._again: list[int] = []  # the sounds of the rows that are retried
        self._generate, self._need_fallback = model.generate_with_fallback, model._need_fallback
        model.generate_with_fallback, model._need_fallback = self._window, self._judge

    def of_rows(self) -> list[int]:
        """Return the sound of each row of the loop that begins."""
        if self._again:
            self._rows, self._again = self._again, []
        return self._rows

    def _window(self, *arguments: Any, seek: Any, batch_idx_map: Any, **options: Any) -> Any:
        self.count, self._rows, self._again = len(seek), list(batch_idx_map), []
        return self._generate(*arguments, seek=seek, batch_idx_map=batch_idx_map, **options)

    def _judge(self, sequence: Any, outputs: Any, index: int, *arguments: Any) -> Any:
        needs_fallback, should_skip = self._need_fallback(sequence, outputs, index, *arguments)
        if needs_fallback:
            self._again.append(self._rows[index])
        return needs_fallback, should_skip
