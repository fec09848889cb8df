"""A JSON object from another process, read field by field: each has its type and its range, or the entry is malformed.

What is written into Redis outlives the process that wrote it: an entry that its reader chokes on would be read, and
choked on, again after every restart. So nothing of one is believed before it was checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import inf
from typing import Any

from wire.errors import EntryMalformed

U32 = 2**32 - 1
I32 = 2**31 - 1
U64 = 2**64 - 1
MAX_TEXT = 65_536
"""Characters; ids, names and messages are far shorter."""


class Body:
    """One object; `what` names it in errors."""

    __slots__ = ("_fields", "_what")

    def __init__(self, fields: Any, what: str) -> None:
        if not isinstance(fields, dict):
            raise EntryMalformed(f"{what}: not an object")
        self._fields: dict[str, Any] = fields
        self._what = what

    @classmethod
    def load(cls, raw: Mapping[bytes, bytes], version: int, what: str) -> Body:
        """The `body` of a stream entry or hash whose `v` is the version we read."""
        found = raw.get(b"v")
        if found != str(version).encode():
            raise EntryMalformed(f"{what}: version {found!r}, this build reads {version}")
        try:
            return cls(json.loads(raw[b"body"]), what)
        except (KeyError, ValueError, RecursionError) as error:
            raise EntryMalformed(f"{what}: body missing or not JSON") from error

    def raw(self, name: str) -> Any:
        """A field of any type that must be there."""
        if name not in self._fields:
            raise EntryMalformed(f"{self._what}: {name} is missing")
        return self._fields[name]

    def text(self, name: str, *, max_length: int = MAX_TEXT) -> str:
        value = self.raw(name)
        if not isinstance(value, str) or len(value) > max_length or not _is_unicode(value):
            raise self._error(name, f"a text of at most {max_length} characters")
        return value

    def integer(self, name: str, low: int, high: int) -> int:
        return self._integer(self.raw(name), name, low, high)

    def number(self, name: str, low: float = -inf, high: float = inf) -> float:
        """A finite number in [low, high]."""
        return self._number(self.raw(name), name, low, high)

    def boolean(self, name: str) -> bool:
        value = self.raw(name)
        if not isinstance(value, bool):
            raise self._error(name, "true or false")
        return value

    def integers(self, name: str, low: int, high: int) -> list[int]:
        return [self._integer(item, name, low, high) for item in self._items(name)]

    def pairs(self, name: str, low: int, high: int) -> Iterator[tuple[int, float]]:
        """A list of [integer in [low, high], finite number]."""
        for item in self._items(name):
            if not isinstance(item, list) or len(item) != 2:
                raise self._error(name, "a list of pairs")
            yield self._integer(item[0], name, low, high), self._number(item[1], name, -inf, inf)

    def nested(self, name: str) -> Body:
        return Body(self.raw(name), f"{self._what}: {name}")

    def nested_list(self, name: str) -> list[Body]:
        return [Body(item, f"{self._what}: {name}") for item in self._items(name)]

    def is_null(self, name: str) -> bool:
        return self.raw(name) is None

    def _items(self, name: str) -> list[Any]:
        value = self.raw(name)
        if not isinstance(value, list):
            raise self._error(name, "a list")
        return value

    def _integer(self, value: Any, name: str, low: int, high: int) -> int:
        if type(value) is not int or not low <= value <= high:
            raise self._error(name, f"an integer from {low} to {high}")
        return value

    def _number(self, value: Any, name: str, low: float, high: float) -> float:
        # bool is an int to isinstance; an int beyond float's range compares, but does not convert
        if type(value) not in (int, float) or not low <= value <= high or abs(value) > 1e300:
            raise self._error(name, f"a finite number from {low} to {high}")
        return float(value)

    def _error(self, name: str, wanted: str) -> EntryMalformed:
        return EntryMalformed(f"{self._what}: {name} must be {wanted}")


def _is_unicode(text: str) -> bool:
    """No lone surrogate, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
