"""Conversations that part on one server: prompts that are kept, and what is told of them."""

import random
import threading
from typing import Any

from lmdecode.serving.app import create_app
from tests.serving.servers import call, load_model, post, serving

SYSTEM = "And the king said unto the prophet, Speak of all the nations that are far away. " * 4


def answered(port: int, messages: list[dict[str, str]], **more: Any) -> tuple[str, int, int]:
    """Return an answer, the tokens of its prompt and how many of them were cached."""
    body = {"messages": messages, "max_tokens": 8, "temperature": 0.9, "seed": 3, **more}
    status, got = post(port, "/v1/chat/completions", body)
    assert status == 200, got
    usage = got["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return got["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


def metric(port: int, name: str) -> float:
    _, text, _ = call(port, "GET", "/metrics")
    return next(float(x.split()[1]) for x in text.splitlines() if x.startswith(f"lmdecode_{name} "))


def test_an_agent_of_twelve_turns_computes_what_is_new() -> None:
    model = load_model()
    engine = model.decoding.engine(max_requests=2, capacity=1024, cache_bytes=1 << 26)
    cold = model.decoding.engine(max_requests=2, capacity=1024)
    with serving(create_app(engine, model)) as port, serving(create_app(cold, model)) as other:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Who?"}]
        before = 0
        for turn in range(12):
            answer, tokens, cached = answered(port, messages)
            assert answer == answered(other, messages)[0]
            assert cached == 0 if turn == 0 else before - 1 <= cached < tokens, (
                turn,
                before,
                cached,
                tokens,
            )
            # Other conversations come between, more than there are slots.
            for one in range(3):
                answered(port, [messages[0], {"role": "user", "content": f"And {one}, {turn}?"}])
            before = tokens
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "?"}]
        assert metric(port, "cache_bytes") > 0
    engine.stop()
    cold.stop()


def test_texts_are_those_of_a_cold_start_under_a_small_budget() -> None:
    model = load_model()
    engine = model.decoding.engine(max_requests=4, capacity=256, cache_bytes=700_000)
    cold = model.decoding.engine(max_requests=1, capacity=256)
    rng = random.Random(2)
    asked = []
    for number in range(24):
        words = SYSTEM.split()[: rng.choice([20, 40])]
        text = " ".join([*words, *(rng.choice(words) for _ in range(rng.randrange(9)))])
        asked.append(([{"role": "user", "content": text}], {"seed": number, "max_tokens": 90}))
    found: dict[int, Any] = {}
    with serving(create_app(engine, model)) as port, serving(create_app(cold, model)) as other:

        def ask(first: int) -> None:
            for at in range(first, len(asked), 4):
                found[at] = answered(port, asked[at][0], **asked[at][1])[0]

        threads = [threading.Thread(target=ask, args=[first]) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for at, (messages, options) in enumerate(asked):
            assert found[at] == answered(other, messages, **options)[0]
        assert metric(port, "pauses_total") > 0
        assert metric(port, "cache_bytes") <= 700_000
    engine.stop()
    cold.stop()
