"""The decoding loop of ``generate()`` for beam search, of groups and with constraints too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lmdecode.integrations.transformers._recorder import Recorder
from lmdecode.integrations.transformers.beam.constrained_search import (
    ConstrainedSearch,
    as_constraints,
    check_tokens,
    constraints_of,
)
from lmdecode.integrations.transformers.beam.group_search import GroupSearch
from lmdecode.integrations.transformers.beam.search import PlainSearch, Search, run_search
from lmdecode.integrations.transformers.beam.settings import SearchSettings, check_groups
from lmdecode.integrations.transformers.generate_call import (
    arguments_of_generate,
    behind_prompt,
    check_tries,
    ending,
    needs_synced_gpus,
    refuse_assistance,
    refuse_trie,
    with_stop_strings,
)
from lmdecode.integrations.transformers.running_model import RunningModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
    from transformers._typing import GenerativePreTrainedModel
    from transformers.generation.streamers import BaseStreamer
    from transformers.generation.utils import (
        GenerateBeamDecoderOnlyOutput,
        GenerateBeamEncoderDecoderOutput,
    )

    from lmdecode.beam.scorers.constraints import Constraint


def _check_beams(config: GenerationConfig, rows: int) -> None:
    """Raise ValueError for inconsistent numbers of beams and results."""
    num_beams = 1 if config.num_beams is None else config.num_beams
    results = config.num_return_sequences
    if num_beams < 2:
        raise ValueError(f"num_beams: expected at least 2 for beam search, got {num_beams}")
    if results > num_beams:
        raise ValueError(
            f"num_return_sequences: expected at most num_beams = {num_beams}, got {results}"
        )
    if rows % num_beams:
        raise ValueError(
            f"input_ids: expected num_beams = {num_beams} rows for each prompt, got {rows} rows"
        )
    if config.low_memory:
        raise ValueError(
            "low_memory: expected None, as in transformers since 4.50 all beams are run at once, "
            f"got {config.low_memory!r}"
        )


def _constraints(
    config: GenerationConfig,
    constraints: Sequence[Constraint] | None,
    force_words_ids: Sequence[Any] | None,
    vocab_size: int,
) -> list[Constraint]:
    """Return all requested constraints; raise ValueError for inconsistent options."""
    if constraints is None:
        constraints = config.constraints
    if force_words_ids is None:
        force_words_ids = config.force_words_ids
    found = as_constraints([] if constraints is None else constraints)
    if force_words_ids is not None:
        found += constraints_of(force_words_ids)
    check_tokens(found, vocab_size)
    if found and config.do_sample:
        raise ValueError("do_sample: expected False with constraints, got True")
    if found and (config.num_beam_groups or 1) != 1:
        raise ValueError(
            f"num_beam_groups: expected 1 with constraints, got {config.num_beam_groups}"
        )
    return found


def beam_search(
    model: GenerativePreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool | None = None,
    streamer: BaseStreamer | None = None,
    *,
    constraints: Sequence[Constraint] | None = None,
    force_words_ids: Sequence[Any] | None = None,
    stop_strings: str | list[str] | None = None,
    tokenizer: Any = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateBeamDecoderOnlyOutput | GenerateBeamEncoderDecoderOutput:
    """Decode with beams: ``model.generate(..., num_beams=4, custom_generate=beam_search)``.

    The loop of ``GenerationMixin._beam_search`` of transformers 5.23, with its choices, scores,
    outputs and stopping, for beam search and, with ``do_sample``, beam sampling. That loop
    takes a log-softmax of all logits, adds the beams' scores, selects the best by ``torch.topk``
    and rearranges its sequences. This one calls ``log_softmax_top_k`` on the model's logits and
    ``beam_step``. It reorders the cache in place, and only if beams change rows. Logits processors
    become arguments of the op. A list with a processor that the op does not have is called as it
    is. ``prefix_allowed_tokens_fn`` may be a ``lmdecode.Trie``: results are its sequences, after
    the prompt. With ``num_beam_groups`` or constraints it is the loop of transformers 4.38.2, as
    transformers 5 has none.

    Parameters
    ----------
    model
        Any model with a language modelling head, decoder-only or encoder-decoder.
    input_ids
        [B * num_beams, S] int64, the prompts (of the decoder), once for each beam.
    logits_processor, stopping_criteria, generation_config
        As ``generate()`` prepares them.
    synced_gpus
        Run the model until every process is done. None: what ``generate()`` was given, or if that
        is None too, whether the weights are sharded over processes.
    streamer
        Must be None, as in transformers.
    constraints
        What every result must contain: ``lmdecode.PhrasalConstraint`` and the like.
        ``generate(constraints=...)`` passes it through.
    force_words_ids
        The same as token ids: a list of phrases, each a list of ids, or a list of such lists, one
        of which must appear. ``generate(force_words_ids=...)`` passes it through.
    stop_strings, tokenizer
        As for ``sample``.
    **model_kwargs
        Arguments of the model's forward pass.

    Returns
    -------
    torch.Tensor or GenerateBeamDecoderOnlyOutput or GenerateBeamEncoderDecoderOutput
        [B * num_return_sequences, S + new tokens] int64; in the latter, for
        ``return_dict_in_generate``, ``scores`` are the processed log-probabilities, [B * num_beams,
        V] float32 a step, and ``beam_indices`` the rows of these that each token was chosen from.

    Raises
    ------
    ValueError
        For fewer than 2 beams, more results than beams, groups that do not divide the beams or have
        no ``diversity_penalty``, groups or constraints that are sampled, a streamer,
        ``low_memory``, and assisted generation; and a ``Trie`` with constraints.
    RuntimeError
        If a prompt whose search has not ended has NaN in its logits, or no candidate above -inf.
    """
    caller = arguments_of_generate(model, streamer)
    refuse_assistance(generation_config, caller.assistant_model, "this is beam search")
    if caller.streamer is not None:
        with ending(caller.streamer):
            raise ValueError("streamer: expected None for beam search, whose tokens are not final")
    tokenizer = caller.tokenizer if tokenizer is None else tokenizer
    stopping_criteria = with_stop_strings(stopping_criteria, stop_strings, tokenizer)
    if synced_gpus is None:
        synced_gpus = caller.synced_gpus
    if synced_gpus is None:
        synced_gpus = needs_synced_gpus(model)
    encoder_outputs = model_kwargs["encoder_outputs"] if model.config.is_encoder_decoder else None
    recorder = Recorder(model, generation_config, encoder_outputs)
    search = search_of_call(
        input_ids, logits_processor, stopping_criteria, generation_config, recorder,
        vocab_size=model.config.get_text_config(decoder=True).vocab_size,
        constraints=constraints, force_words_ids=force_words_ids,
    )  # fmt: skip
    with RunningModel(
        model, generation_config, model_kwargs, recorder, synced_gpus=synced_gpus
    ) as running:
        running.follow_beams()
        beams = run_search(running, search, input_ids)
        running.wait_for_others(beams)
        return recorder.beam_result(search.finish(beams), running.cache)


def search_of_call(
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    recorder: Recorder,
    *,
    vocab_size: int,
    constraints: Sequence[Constraint] | None,
    force_words_ids: Sequence[Any] | None,
) -> Search:
    """Return the search for a call of ``generate()``; takes the arguments of ``beam_search``.

    Raises ValueError for inconsistent options.
    """
    _check_beams(generation_config, input_ids.shape[0])
    all_constraints = _constraints(generation_config, constraints, force_words_ids, vocab_size)
    num_groups = check_groups(generation_config)
    logits_processor = behind_prompt(logits_processor, input_ids.shape[1])
    check_tries(logits_processor, vocab_size)
    if all_constraints:
        refuse_trie(logits_processor, "constraints, force_words_ids", "none", "some")
    settings = SearchSettings.of(generation_config, input_ids)
    common = (input_ids, logits_processor, stopping_criteria, recorder)
    if all_constraints:
        return ConstrainedSearch(settings, all_constraints, *common)
    if num_groups > 1:
        penalty = generation_config.diversity_penalty or 0.0
        return GroupSearch(settings, num_groups, penalty, *common)
    plain = getattr(logits_processor, "search", PlainSearch)  # of other rules
    return plain(settings, bool(generation_config.do_sample), *common)
