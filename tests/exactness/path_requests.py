"""What is asked on every path that KV can take, how answers are compared, and what their traces say of the path."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer

from observability import names
from tests.exactness.prompts import PROMPTS
from tests.exactness.reference import LOGPROB_TOLERANCE, encode_prompt
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan
from wire.ids import UNIT_TOKENS

NAME = "text-100"
"""Of prompts.py, the prompt of all requests but "chat"."""
COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": 5},
    "choices": {"n": 2, "seed": 7, "temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.5, "logprobs": 2},
    "stopped": {"seed": 9, "temperature": 0.7, "min_p": 0.02, "stop": [" the", "e "], "max_tokens": 48},
}
CHAT = {
    "n": 2,
    "seed": 3,
    "temperature": 0.8,
    "top_k": 30,
    "presence_penalty": 0.4,
    "logprobs": True,
    "top_logprobs": 4,
}
REQUESTS = (*COMPLETIONS, "chat")
NUM_CHOICES = 6
"""Of all requests together."""
MAX_TOKENS = 24
_salts = count()


@dataclass(frozen=True)
class Answer:
    choices: list[dict[str, Any]]
    prompt: list[int]
    trace_id: str

    @property
    def full_units_tokens(self) -> int:
        """All of the prompt that can come from elsewhere: its last token is always computed."""
        return (len(self.prompt) - 1) // UNIT_TOKENS * UNIT_TOKENS


class Client:
    """Asks one stack. Each request has a salt of its own, so that nothing comes from another one's cache."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model_dir: Path) -> None:
        self._session = session
        self._url = url
        prompt = next(p for p in PROMPTS if p.name == NAME)
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self._prompt = encode_prompt(prompt, tokenizer)
        self._text = prompt.text[: prompt.length]

    @staticmethod
    def salts() -> dict[str, str]:
        """New ones, by request."""
        number = next(_salts)
        return {name: f"{name}-{number}" for name in REQUESTS}

    async def plant(self, salts: Mapping[str, str]) -> dict[str, Answer]:
        """Have the prompts computed, and one token each."""
        return {name: await self._ask(name, salts[name], n=1, max_tokens=1) for name in REQUESTS}

    async def ask(self, salts: Mapping[str, str]) -> dict[str, Answer]:
        """One after the other."""
        return {name: await self._ask(name, salts[name]) for name in REQUESTS}

    async def ask_at_once(self, salts: Mapping[str, str]) -> dict[str, Answer]:
        answers = await asyncio.gather(*(self._ask(name, salts[name]) for name in REQUESTS))
        return dict(zip(REQUESTS, answers, strict=True))

    async def refusal(self) -> dict[str, Any]:
        """The error that constrained output gets."""
        body = self._body("chat", "") | {"response_format": {"type": "json_object"}}
        async with self._session.post(f"{self._url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 400
            return dict(await answer.json())

    async def _ask(self, name: str, salt: str, **params: Any) -> Answer:
        route = "chat/completions" if name == "chat" else "completions"
        trace_id = secrets.token_hex(16)
        headers = {"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"}
        body = self._body(name, salt) | params
        async with self._session.post(f"{self._url}/v1/{route}", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            found = await answer.json()
        prompt = found.get("prompt_token_ids") or found["choices"][0]["prompt_token_ids"]
        return Answer(found["choices"], prompt, trace_id)

    def _body(self, name: str, salt: str) -> dict[str, Any]:
        common = {"model": "m", "max_tokens": MAX_TOKENS, "return_token_ids": True, "cache_salt": salt}
        if name == "chat":
            return common | {"messages": [{"role": "user", "content": self._text}]} | CHAT
        return common | {"prompt": self._prompt} | COMPLETIONS[name]


def check_same(found: Any, wanted: Any, where: str = "") -> None:
    """Equal, but for log-probabilities: within LOGPROB_TOLERANCE."""
    if isinstance(wanted, float):
        assert abs(found - wanted) <= LOGPROB_TOLERANCE, f"{where}: {found}, not {wanted}"
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key in wanted:
            check_same(found[key], wanted[key], f"{where}.{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), f"{where}: {found}, not {wanted}"
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            check_same(one, other, f"{where}[{index}]")
    else:
        assert found == wanted, f"{where}: {found}, not {wanted}"


def check_answers(found: Mapping[str, Answer], wanted: Mapping[str, Answer]) -> None:
    for name, answer in found.items():
        check_same(answer.choices, wanted[name].choices, name)


class Traces:
    """What the services said of single requests."""

    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    async def chunks(self, answer: Answer) -> list[int]:
        """Tokens of each prefill chunk, of all choices."""
        return [span.attributes[names.CHUNK_TOKENS] for span in await self._spans(answer, names.SPAN_PREFILL_CHUNK)]

    async def transfers(self, answer: Answer) -> list[dict[str, Any]]:
        """Attributes of each transfer of KV; none may have failed."""
        spans = await self._spans(answer, names.SPAN_KV_TRANSFER)
        assert all(span.error is None for span in spans), [span.error for span in spans]
        return [span.attributes for span in spans]

    async def _spans(self, answer: Answer, name: str) -> Sequence[ReceivedSpan]:
        def of_the_answer(spans: list[ReceivedSpan], name: str) -> list[ReceivedSpan]:
            return [span for span in spans if span.trace_id == answer.trace_id and span.name == name]

        def is_whole(spans: list[ReceivedSpan]) -> bool:
            """The scheduler's spans come with this one, the workers' with the last of theirs."""
            decodes = of_the_answer(spans, names.SPAN_DECODE)
            return bool(of_the_answer(spans, names.SPAN_SCHEDULE)) and len(decodes) >= len(answer.choices)

        return of_the_answer(await self._receiver.wait_for(is_whole), name)
