"""Server-sent events out of bytes as they arrive; pure."""

from __future__ import annotations

DONE = b"[DONE]"


class SseReader:
    """`feed(bytes)` → the data of each line that became complete. OpenAI-style streams have one line per event."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
