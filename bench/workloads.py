"""Seeded synthetic workloads: the same name, number, seed and scale give the same requests on every machine.

| name | shape at scale 1, in words of about 1.3 tokens |
|---|---|
| chat | one system prompt of 200 shared by all; 8 conversations at a time of 2 to 6 turns; a turn adds a question of 10 to 60 and, before the next, an answer of 40 to 120; 32 to 128 tokens out |
| rag | one of 8 contexts of 1,500, the k-th most popular 1/k as often as the first; a question of 8 to 24; 32 to 96 tokens out |
| reasoning | a prompt of 30 to 120, nothing shared; 512 to 1,024 tokens out |
| agent | one system prompt of 300 shared by all; 4 agents at a time of 3 to 8 steps; a step adds a tool call of 10 to 30 and JSON-like output of 60 to 250; 24 to 80 tokens out |

Earlier answers in a conversation are scripted, not the server's: a request depends on no response, so arrivals never
wait, two servers get the same bytes, and a server can reuse the prompt of the last turn but not what it generated.
"""  # noqa: E501  # a table row is one line

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from bench.prompts import Messages, PromptRequest, Workload

CHAT_LIVE, RAG_CONTEXTS, AGENTS_LIVE = 8, 8, 4
_TEXT = """
about above across action after again air all along also always among animal answer any area around ask away back base
because been before begin behind best better between big bird black blue boat body book both bring build call came can
car carry case change city clear close cold color come common could country course cover cross dark day deep did
differ direct door down draw drive during each early earth east easy eat end enough even ever every example eye face
fact fall family far farm fast father feel few field figure find fine fire first fish five follow food foot form found
four free friend from front full game gave get girl give gold good govern great green ground group grow had half hand
happen hard head hear heat help here high hold home horse hot hour house hundred idea inch interest island just keep
kind king knew know land language large last late laugh lead learn leave left less letter life light line list listen
little live long look love low machine made main make many map mark may mean measure men might mile mind minute miss
money moon more morning most mother mountain move much music must name near need never new next night north note
nothing notice noun number object ocean off often old once only open order other over own page paper part pass pattern
people perhaps person picture piece place plain plan plane plant play point port power press problem produce product
pull put question quick rain ran reach read ready real record red rest right river road rock room round rule run said
same saw say school science sea second see seem self sentence serve set several shape ship short should show side
simple since sing size sleep slow small snow some song soon sound south special spell stand star start state stay step
still stood stop story street strong study such sun sure surface table tail take talk teach tell test than thing think
though thought thousand through time together told too took top toward town travel tree true try turn two under unit
until use usual very voice vowel wait walk want war warm watch water way week weight well went west wheel where while
white whole why will wind wonder wood word work world would write year young
"""
WORDS = _TEXT.split()


@dataclass(slots=True)
class _Writer:
    """Random text. `scale` multiplies every length, with one word or token at least."""

    rng: random.Random
    scale: float

    def between(self, low: int, high: int) -> int:
        return max(1, round(self.rng.randint(low, high) * self.scale))

    def words(self, low: int, high: int) -> str:
        return " ".join(self.rng.choices(WORDS, k=self.between(low, high)))

    def tool_output(self, low: int, high: int) -> str:
        """Rows as a tool would print them, of about so many words."""
        rows = []
        left = self.between(low, high)
        while left > 0:
            name, value = self.rng.choices(WORDS, k=2)
            rows.append({name: value, "count": self.rng.randrange(10_000)})
            left -= 4
        return json.dumps(rows)


@dataclass(slots=True)
class _Conversation:
    turns_left: int
    messages: list[dict[str, str]] = field(default_factory=list)


def _say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _conversations(
    write: _Writer,
    live: int,
    turns: tuple[int, int],
    system: str,
    grow: Callable[[list[dict[str, str]]], None],
    max_tokens: tuple[int, int],
) -> Iterator[PromptRequest]:
    """For ever: a random live conversation takes its next turn; one that ended makes room for a new one."""

    def new() -> _Conversation:
        return _Conversation(write.rng.randint(*turns), [_say("system", system)])

    running = [new() for _ in range(live)]
    while True:
        number = write.rng.randrange(live)
        if running[number].turns_left == 0:
            running[number] = new()
        conversation = running[number]
        conversation.turns_left -= 1
        grow(conversation.messages)
        yield PromptRequest(Messages(tuple(conversation.messages)), write.between(*max_tokens))


def _chat(write: _Writer) -> Iterator[PromptRequest]:
    def grow(messages: list[dict[str, str]]) -> None:
        if messages[-1]["role"] == "user":
            messages.append(_say("assistant", write.words(40, 120)))
        messages.append(_say("user", write.words(10, 60)))

    return _conversations(write, CHAT_LIVE, (2, 6), write.words(200, 200), grow, (32, 128))


def _agent(write: _Writer) -> Iterator[PromptRequest]:
    def grow(messages: list[dict[str, str]]) -> None:
        if messages[-1]["role"] == "system":
            messages.append(_say("user", "Task: " + write.words(20, 60)))
            return
        messages.append(_say("assistant", "Call: " + write.words(10, 30)))
        # Not the role "tool": many chat templates refuse it.
        messages.append(_say("user", "Tool output: " + write.tool_output(60, 250)))

    return _conversations(write, AGENTS_LIVE, (3, 8), write.words(300, 300), grow, (24, 80))


def _rag(write: _Writer) -> Iterator[PromptRequest]:
    contexts = [write.words(1500, 1500) for _ in range(RAG_CONTEXTS)]
    popularity = [1 / rank for rank in range(1, RAG_CONTEXTS + 1)]
    while True:
        (context,) = write.rng.choices(contexts, popularity)
        asked = f"Context: {context}\n\nQuestion: {write.words(8, 24)}?"
        yield PromptRequest(Messages((_say("user", asked),)), write.between(32, 96))


def _reasoning(write: _Writer) -> Iterator[PromptRequest]:
    while True:
        yield PromptRequest(Messages((_say("user", write.words(30, 120)),)), write.between(512, 1024))


SYNTHETIC: dict[str, Callable[[_Writer], Iterator[PromptRequest]]] = {
    "chat": _chat,
    "rag": _rag,
    "reasoning": _reasoning,
    "agent": _agent,
}


def synthetic_workload(name: str, *, requests: int, warm_up: int, seed: int, scale: float) -> Workload:
    """One of SYNTHETIC."""

    def take(number: int, stream: str) -> list[PromptRequest]:
        rng = random.Random(f"{name} {seed} {stream}")  # a string seeds the same everywhere
        return list(islice(SYNTHETIC[name](_Writer(rng, scale)), number))

    return Workload(name, take(requests, "measured"), take(warm_up, "warm-up"))
