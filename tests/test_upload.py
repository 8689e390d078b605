"""Numbers go to a GPU through pinned memory; no GPU is asked for here."""

from typing import Any

import pytest
import torch

import lmdecode
from lmdecode import _upload


def test_on_the_cpu_and_on_meta() -> None:
    got = _upload.uploaded([1, 2, 3], torch.int64, "cpu")
    assert torch.equal(got, torch.tensor([1, 2, 3]))
    assert _upload.sent(got, torch.device("cpu")) is got
    assert _upload.uploaded([1.5], torch.float32, "meta").shape == (1,)
    with torch.device("meta"):  # the default device is nobody's wish here
        assert _upload.uploaded([7], torch.int32, "cpu").item() == 7


@pytest.mark.parametrize("captures", [False, True])
def test_copies_to_a_gpu_are_pinned_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, captures: bool
) -> None:
    """But a graph that is captured would read the pinned memory later, too."""
    calls: list[Any] = []
    to = torch.Tensor.to

    def pin(self: torch.Tensor) -> torch.Tensor:
        calls.append("pinned")
        return self

    def watch(self: torch.Tensor, device: Any, **options: Any) -> torch.Tensor:
        calls.append((torch.device(device).type, options))
        return to(self, "cpu")

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", watch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    got = _upload.uploaded([1, 2], torch.int64, "cuda")
    assert got.tolist() == [1, 2]
    assert calls == ([("cuda", {})] if captures else ["pinned", ("cuda", {"non_blocking": True})])


def test_lists_of_the_ops_go_that_way(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[float]] = []
    send = _upload.sent

    def watch(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
        seen.append(tensor.tolist())
        return send(tensor, device)

    monkeypatch.setattr(_upload, "sent", watch)
    logits = torch.arange(12.0).view(4, 3)
    lmdecode.top_k_top_p_sample(logits, top_k=[1, 2, 3, 0])
    assert [1, 2, 3, 0] in seen
    seen.clear()
    lmdecode.log_softmax_top_k(logits, torch.zeros(4), num_beams=[1, 3], num_candidates=2)
    assert [0, 1, 4] in seen
