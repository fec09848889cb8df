"""Fields of a request's journal (keys.journal): output that outlives both a scheduler and a reply stream.

o:<choice>:<position>   packed tokens [position, position + n) of a choice; pieces may overlap
f:<choice>              "<num_tokens>:<finish reason>", once the choice is over
tail                    id in replies:<gateway>: everything published up to it is in the journal
terminal                body of a reply entry that holds the request's TerminalReply
"""

from __future__ import annotations

from dataclasses import dataclass, field

from wire.entries import VERSION, ReplyEntry, TerminalReply, unpack_tokens
from wire.errors import EntryMalformed
from wire.ids import Fence

TAIL = "tail"
TERMINAL = "terminal"


def output_field(choice: int, position: int) -> str:
    return f"o:{choice}:{position}"


def finish_field(choice: int) -> str:
    return f"f:{choice}"


def encode_finish(num_tokens: int, finish_reason: str) -> str:
    return f"{num_tokens}:{finish_reason}"


def encode_terminal(fence: Fence, terminal: TerminalReply) -> str:
    return str(ReplyEntry(fence, [terminal]).encode()["body"])


@dataclass(slots=True)
class Output:
    """What is known of one choice: its tokens from position 0 up to the first gap, and how it ended."""

    tokens: list[int] = field(default_factory=list)
    num_tokens: int | None = None
    """The whole output's length, once the choice is over."""
    finish_reason: str | None = None

    def extend(self, position: int, tokens: list[int]) -> None:
        """Take tokens [position, …) as far as they continue what is known; a piece beyond a gap is dropped."""
        known = len(self.tokens)
        if position <= known:
            self.tokens += tokens[known - position :]

    @property
    def is_whole(self) -> bool:
        return self.num_tokens is not None and len(self.tokens) >= self.num_tokens


@dataclass(slots=True)
class Journal:
    outputs: dict[int, Output] = field(default_factory=dict)
    """By choice."""
    tail: bytes | None = None
    terminal: TerminalReply | None = None

    def output(self, choice: int) -> Output:
        return self.outputs.setdefault(choice, Output())

    @classmethod
    def decode(cls, raw: dict[bytes, bytes]) -> Journal:
        """From HGETALL; fields of others are skipped. Raises EntryMalformed."""
        journal = cls(tail=raw.get(TAIL.encode()))
        pieces: list[tuple[int, int, bytes]] = []
        for name, value in raw.items():
            try:
                match name.split(b":"):
                    case [b"o", choice_digits, position_digits]:
                        pieces.append((int(choice_digits), int(position_digits), value))
                    case [b"f", choice_digits]:
                        length, _, reason = value.decode().partition(":")
                        output = journal.output(int(choice_digits))
                        output.num_tokens, output.finish_reason = int(length), reason
            except ValueError as error:
                raise EntryMalformed(f"journal field {name!r}: {error!r}") from error
        for choice, position, packed in sorted(pieces):
            journal.output(choice).extend(position, unpack_tokens(packed))
        if (body := raw.get(TERMINAL.encode())) is not None:
            items = ReplyEntry.decode({b"v": str(VERSION).encode(), b"body": body}).items
            journal.terminal = next((item for item in items if isinstance(item, TerminalReply)), None)
        return journal
