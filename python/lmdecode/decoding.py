"""``Decoding``: a packed model with transformers' folders, ``generate()`` and tokenizers."""

from __future__ import annotations

import copy
import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmdecode._checks import check_bool, is_list, type_error
from lmdecode.beam.engine.request import BeamRequest, BeamResult
from lmdecode.decoder.decoding import PackedDecoding
from lmdecode.decoder.device_loop import DeviceDecoder
from lmdecode.decoder.embedding import check_pooling_of_files, embedded
from lmdecode.models.packed_causal import PackedCausalModel
from lmdecode.models.packed_stack import PackedDecoder
from lmdecode.models.saved import PackedEncoderDecoder, damaged_configs

__all__ = ["Decoding"]

# What transformers raises for configs that it cannot take.
_ERRORS_OF_CONFIGS = (AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError)


class _SavedConfigs:
    """The configs of a saved decoder-only model; transformers' stand-in is made where it is needed.

    Files of the folder are read now, as another model may be saved there later. Raises ValueError
    for one that is not JSON, or has no dict.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self._folder, names = folder, ("config.json", "generation_config.json")
        self._files = {
            name: (folder / name).read_bytes() for name in names if name in manifest["files"]
        }
        configs = {name: json.loads(data) for name, data in self._files.items()}
        for name, config in configs.items():
            if not isinstance(config, dict):
                raise ValueError(f"{name} has a {type(config).__name__}; expected a dict")
        self.config: dict[str, Any] = configs["config.json"]
        self.generation_config: dict[str, Any] | None = configs.get("generation_config.json")
        self.model_class: str | None = manifest.get("model_class")
        self.pooling: str = manifest.get("pooling", "last")

    def skeleton(self) -> Any:
        """Return the model without weights."""
        from lmdecode.readers.transformers.stand_in import skeleton_of

        with tempfile.TemporaryDirectory() as own:
            for name, data in self._files.items():
                (Path(own) / name).write_bytes(data)
            try:
                model = skeleton_of(Path(own))
            except (
                AttributeError,
                KeyError,
                OSError,
                RuntimeError,
                TypeError,
                ValueError,
            ) as error:
                raise damaged_configs(self._folder, error) from error
        model.config._name_or_path = model.name_or_path = str(self._folder)
        return model


class Decoding(PackedDecoding):
    """A decoder-only model, or the decoder of an encoder-decoder one, in C++.

    For an encoder-decoder model, the whole loop runs without a return to Python: embedding, layers,
    projection to the vocabulary, logits processors, beam search and early stop. Keys and values of
    the memory are computed once per request and shared by its beams. Those of the sequences are
    never moved. For a decoder-only model, a step from tokens to logits is one op. Its keys and
    values are in blocks that beams share. A result depends only on its own request, not on the
    batch or the number of threads.

    Parameters
    ----------
    config : DecoderConfig or CausalConfig
        Config of the decoder.
    weights : DecoderWeights or CausalWeights
        Weights, which are packed once. Weights of a ``DecoderConfig`` on a CUDA device stay there,
        and the loop runs there.
    dtype : {"float32", "bfloat16", "int8", "int4"}
        Format of linear weights and their products; see docs/reference/decoder.md. "float32" gives
        the tokens of transformers. The scores of other formats differ slightly, so tokens of nearly
        equal scores may swap. On a CUDA device: "float32", "float16" and "bfloat16".
        ``torch.bfloat16`` and "bf16" are accepted, too.
    cache_dtype : {"float32", "bfloat16", "int8"}, optional
        Format of the keys and values of a decoder-only model, "float32" by default.
    use_cuda_graph : bool
        On a CUDA device: each search captures its step in a CUDA graph, and replays it.

    Raises
    ------
    ValueError, TypeError
        A weight has a wrong shape, dtype or type, ``dtype`` is unsupported, or a graph is requested
        without a CUDA device.
    """

    _model: Any = None
    _saved: _SavedConfigs | None = None

    @property
    def model(self) -> Any:
        """The transformers model, or its stand-in, or None; of a saved one made when asked for."""
        if self._model is None and self._saved is not None:
            self._model = self._saved.skeleton()
        return self._model

    @model.setter
    def model(self, model: Any) -> None:
        self._model, self._saved = model, None

    @classmethod
    def from_pretrained(
        cls,
        model: Any,
        dtype: str | torch.dtype | None = "float32",
        *,
        cache_dtype: str | torch.dtype | None = None,
        keep_model: bool = True,
        use_cuda_graph: bool = False,
        mtp: bool = False,
    ) -> Decoding:
        """Make a ``Decoding`` of a transformers model, which is loaded if its name is given.

        Parameters
        ----------
        model
            A causal language model of an architecture in docs/reference/causal_models.md, or a
            conditional generation model of one in docs/reference/decoder.md. Or the folder or name
            of such a model; the weights of a causal model in a folder of safetensors are read and
            packed one by one. Or a GGUF file of llama.cpp: see docs/reference/formats.md. Or a
            folder of CTranslate2: see docs/reference/ctranslate2.md.
        dtype : {"float32", "bfloat16", "int8", "int4"} or None
            See the class. None, for a GGUF file: every weight keeps the values in the file.
        cache_dtype, use_cuda_graph
            See the class.
        keep_model : bool
            Whether ``decoding.model`` is the model itself. On a CUDA device it always is, as its
            encoder runs there. False: ``decoding.model`` is a stand-in without weights, which
            ``generate`` needs. It always is where the weights of a folder are read one by one. The
            stand-in of an encoder-decoder model lacks the features of ``generate`` that need the
            model's own encoder: see docs/reference/decoder.md.
        mtp : bool
            Whether to load what a model of Qwen 3.5 or Qwen 3 Next has for multi-token prediction,
            of a folder of safetensors or a GGUF file: ``assistant_model="mtp"`` drafts with it.

        Raises
        ------
        ValueError
            The model or dtype is unsupported, or a file, which is named, is damaged.
        OSError
            There is no model of this name.
        """
        from lmdecode.readers.loading import check_as_it_is, load_parts
        from lmdecode.readers.transformers.models import parts_of
        from lmdecode.readers.transformers.stand_in import skeleton, without_weights

        is_loaded_here = isinstance(model, (str, os.PathLike))
        check_bool("Decoding.from_pretrained", "mtp", mtp)
        if dtype is None:
            check_as_it_is(model)
        if is_loaded_here:
            model, config, weights = load_parts(model, keeps_blocks=dtype is None, mtp=mtp)
        elif mtp:
            raise ValueError(
                f"Decoding.from_pretrained: mtp is True for a {type(model).__name__}; expected "
                "a folder or a file, as transformers does not load these weights"
            )
        elif not hasattr(model, "config"):
            raise ValueError(
                f"Decoding.from_pretrained: model is a {type(model).__name__} of type "
                f"{getattr(model, 'model_type', None)!r}; expected a model of transformers, or the "
                "folder or name of one"
            )
        else:
            config, weights = parts_of(model)
        options: dict[str, Any] = {"cache_dtype": cache_dtype, "use_cuda_graph": use_cuda_graph}
        decoding = cls(config, weights, dtype=dtype, **options)
        if isinstance(decoding.decoder, PackedDecoder):
            from lmdecode.integrations.transformers.decoding.encoding import ModelEncoder

            decoder = decoding.decoder
            decoding.encoder = ModelEncoder(model, decoder.weight_format, decoder.embedding)
        if not keep_model and not isinstance(decoding.decoder, DeviceDecoder):
            if is_loaded_here:
                model = without_weights(model)
            else:  # configs of their own: transformers writes the dtype to one
                model = skeleton(*copy.deepcopy((model.config, model.generation_config)))
                if decoding.encoder is not None:
                    decoding.encoder = ModelEncoder.of_parts(model, decoding.encoder.parts)
        decoding.model = model
        return decoding

    def _take_model(
        self,
        folder: Path,
        packed: PackedCausalModel | PackedEncoderDecoder,
        manifest: dict[str, Any],
    ) -> None:
        """Take the model of a folder's configs, and the encoder, where the folder has them."""
        if "config.json" not in manifest["files"]:
            return
        if isinstance(packed, PackedCausalModel):
            self._saved = _SavedConfigs(folder, manifest)
            return
        from lmdecode.readers.transformers.stand_in import skeleton_of

        self.model = skeleton_of(folder)
        if "encoder" in packed.parts:
            from lmdecode.integrations.transformers.decoding.encoding import ModelEncoder

            self.encoder = ModelEncoder.of_parts(self.model, packed.parts)

    def _generation_default(self, name: str) -> Any:
        saved = self._saved
        if self._model is None and saved is not None and saved.generation_config is not None:
            return saved.generation_config.get(name)
        return super()._generation_default(name)

    @property
    def model_class(self) -> str | None:
        """Name of the class of transformers that the model is of, None where there is no model."""
        known = self._kind()
        if known is None and self.model is not None:
            known = type(self.model).__name__
        return known

    def _kind(self) -> str | None:
        if self._model is not None:
            return type(self._model).__name__
        return None if self._saved is None else self._saved.model_class

    def _request_of_config(self, prompt_ids: Any, generation_config: Any) -> BeamRequest:
        from lmdecode.integrations.transformers.decoding.requests import request_of_config

        return request_of_config(prompt_ids, generation_config, self.model)

    def _check_store(self, store: Any) -> None:
        from lmdecode.causal_fingerprint import check_causal_store

        check_causal_store("Decoding.engine", self, store)

    def _facts(self) -> dict[str, Any]:
        facts = {} if self.model is None else {"model_class": type(self.model).__name__}
        if isinstance(self.decoder, PackedCausalModel):
            from lmdecode.causal_fingerprint import weights_hash

            facts |= {"weights_hash": weights_hash(self.decoder), "pooling": self._pooling}
        return facts

    def _files(self) -> dict[str, bytes]:
        if self.model is None:
            return {}
        from lmdecode.readers.loading import files_of

        return files_of(self.model)

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        *,
        store: Any = None,
        session: str | None = None,
        append: bool = False,
        rewind: bool = False,
        **arguments: Any,
    ) -> Any:
        """Generate tokens; the result is the same type as ``model.generate(...)`` returns.

        With the format "float32" the tokens equal those of transformers. It can replace the
        model's own method: ``model.generate = decoding.generate``.

        Parameters
        ----------
        inputs : Tensor, optional
            ``input_ids`` or ``input_features``, as for the model.
        store : KVStore, optional
            Opened with ``fingerprint()``, for a decoder-only model and one prompt: the keys and
            values of the longest stored prefix are loaded, the rest is computed and stored. Tokens
            and logits are bitwise the same as without a store. A failure of the store is a
            ``RuntimeWarning``.
        session : str, optional
            Name of a conversation of the store: prompt and answer become its tokens.
        append, rewind : bool, optional
            append: ``inputs`` and ``attention_mask`` hold the new tokens alone, which follow the
            session's. rewind: tokens that do not continue the session's rewind it; without it they
            are a ``ValueError``.
        **arguments
            Those of the model's ``generate()``: ``num_beams`` (1: greedy), lengths, penalties,
            ``num_return_sequences``, end tokens, forced, suppressed and bad tokens,
            ``decoder_input_ids``, ``encoder_outputs``, ``attention_mask``, ``num_beam_groups``,
            ``return_dict_in_generate`` with ``output_scores`` and so on, with the model's
            ``generation_config`` for defaults. Processors and criteria that the loop in C++ does
            not have are called step by step. ``do_sample`` takes ``seed``; a decoder-only model
            also takes ``streamer``, ``constraints`` and ``force_words_ids``, as ``sample`` and
            ``beam_search`` of ``lmdecode.integrations.transformers`` do, and without beams
            ``prompt_lookup_num_tokens``: the same text in fewer steps.
            ``use_cache``, ``cache_implementation``, ``cache_config``, ``prefill_chunk_size`` and
            ``compile_config`` have no meaning here and no effect.

        Raises
        ------
        ValueError, TypeError
            An unsupported argument, or one of a wrong type. No other argument is ignored.
        """
        from lmdecode.integrations.transformers.decoding.call import call_generate

        return call_generate(self, inputs, store, session, arguments, append=append, rewind=rewind)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        """The tokenizer of the model's own file or folder; raises ValueError without one."""
        from lmdecode.readers.loading import tokenizer_of

        source = getattr(self.model, "name_or_path", "")
        try:
            if source:
                return tokenizer_of(source)
            reason = "the model came without a file or folder"
        except (OSError, ValueError) as error:
            reason = str(error)
        raise ValueError(
            "Decoding.embed: tokenizer is None; expected one, or texts that are lists of tokens, "
            f"as the model has none of its own ({reason})"
        )

    @functools.cached_property
    def _pooling(self) -> str:
        """The word of the model's files for how vectors are made; "last" where they have none."""
        from lmdecode.readers.loading import pooling_of

        if self._saved is not None:
            return self._saved.pooling
        source = getattr(self.model, "name_or_path", "")
        return pooling_of(source) if source else "last"

    def embed(
        self,
        texts: Any,
        *,
        tokenizer: Any = None,
        pooling: str | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
    ) -> Tensor:
        """Return a vector for each text, by a decoder-only model: what it makes of the tokens.

        A text's vector has the same bits alone, in any batch and on any number of threads. No
        logits are computed.

        Parameters
        ----------
        texts : list of str, list of lists of int, or str
            Texts, or their tokens, any number of them; one text is a list of one.
        tokenizer : optional
            Has ``encode(text)``, as transformers' tokenizers have, for texts that are ``str``. By
            default that of the model's file or folder.
        pooling : {"last", "mean"}, optional
            "last": the features of the last token, behind the final norm. "mean": their mean over
            all tokens. By default what the model's files say: ``pooling_type`` of a GGUF file,
            ``1_Pooling/config.json`` of a folder; else "last".
        normalize : bool
            Whether vectors have length 1.
        dimensions : int, optional
            The first ones of a vector are returned, and normalised.

        Returns
        -------
        Tensor
            float32 [texts, dimensions]; without ``dimensions`` [texts, model_size].

        Raises
        ------
        ValueError, TypeError
            A wrong argument; a text without tokens, with others than the model's, or too long,
            which is named by its index; or the model is not decoder-only, or its files ask for
            another pooling.
        RuntimeError
            The features have NaN or infinities.
        """
        op, decoder = "Decoding.embed", self.decoder
        if not isinstance(decoder, PackedCausalModel):
            raise ValueError(
                f"{op}: the model has a {type(decoder).__name__}; expected a decoder-only model"
            )
        texts = [texts] if isinstance(texts, str) else texts
        if not is_list(texts):
            raise type_error(op, "texts", texts, "a list of texts, or of lists of tokens")
        if any(isinstance(text, str) for text in texts):
            encode = getattr(self._tokenizer if tokenizer is None else tokenizer, "encode", None)
            if not callable(encode):
                raise type_error(op, "tokenizer", tokenizer, "one with encode(text)")
            texts = [encode(text) if isinstance(text, str) else text for text in texts]
        return embedded(
            op,
            decoder,
            self.cache_dtype,
            texts,
            pooling=check_pooling_of_files(op, self._pooling) if pooling is None else pooling,
            normalize=normalize,
            dimensions=dimensions,
        )

    def translate(
        self,
        sources: Any,
        *,
        attention_mask: Tensor | None = None,
        num_beams: int | None = None,
        num_return_sequences: int | None = None,
        max_new_tokens: int | None = None,
        max_batch_tokens: int | None = None,
        generation_config: Any = None,
        **arguments: Any,
    ) -> list[BeamResult]:
        """Translate any number of sources, without the setup cost of ``generate()``.

        Sources are sorted by length and searched in batches. The tokens equal those of
        ``generate()``.

        Parameters
        ----------
        sources : sequence of sequence of int, or Tensor
            Tokens of each source, including the end token of the tokenizer; or [B, S].
        attention_mask : Tensor, optional
            [B, S], for a tensor: 0 for padding, which is removed at any position.
        num_beams, num_return_sequences, max_new_tokens : int, optional
            As for ``generate()``. None: the value of ``generation_config``, or else the model's.
        max_batch_tokens : int, optional
            Tokens of a batch, including padding; 4096 by default.
        generation_config, **arguments
            As for ``generate()``, as far as a ``BeamRequest`` has them.

        Returns
        -------
        list of BeamResult
            In the order of the sources; ``request_id`` is the source's index.

        Raises
        ------
        ValueError, TypeError
            Names the argument, what came and what was expected.
        """
        from lmdecode.integrations.transformers.decoding.translate import translate

        return translate(
            self,
            sources,
            attention_mask=attention_mask,
            max_batch_tokens=max_batch_tokens,
            generation_config=generation_config,
            num_beams=num_beams,
            num_return_sequences=num_return_sequences,
            max_new_tokens=max_new_tokens,
            **arguments,
        )

    def fingerprint(self, tokenizer: Any = None) -> Any:
        """Return the fingerprint of a decoder-only model's keys and values, for a ``KVStore``.

        It differs by revision, ``dtype``, ``cache_dtype`` and CPU capability. transformers' own
        caches have yet another one, ``Fingerprint.from_model``. The packed weights are hashed once
        (SHA-256, about 2 GB/s).

        Parameters
        ----------
        tokenizer
            Its vocabulary is hashed too.

        Returns
        -------
        Fingerprint
            Of ``lmdecode.store``.

        Raises
        ------
        ValueError
            The model is not decoder-only.
        """
        from lmdecode.causal_fingerprint import causal_fingerprint

        return causal_fingerprint(self, tokenizer)
