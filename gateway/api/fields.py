"""Strict reader of one JSON object: no coercion, and every error names the field, the limit and what came."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NoReturn

from wire.errors import InvalidRequest

_KINDS = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array", dict: "an object"}


def kind_of(value: Any) -> str:
    """What a JSON value is, in words."""
    return "null" if value is None else _KINDS.get(type(value), "an array")


def invalid(field: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {problem}", param=field)


class Fields:
    """One object of a request body. `null` counts as absent, as OpenAI's clients send it."""

    def __init__(self, values: dict[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path

    def name(self, field: str) -> str:
        """The field's full name, for errors."""
        return f"{self._path}.{field}" if self._path else field

    def fail(self, field: str, problem: str) -> NoReturn:
        raise invalid(self.name(field), problem)

    def refuse_others(self, known: Collection[str]) -> None:
        """Raise naming the first field that is none of `known`."""
        for field, value in self._values.items():
            if field not in known and value is not None:
                self.fail(field[:64], "unknown field")

    def raw(self, field: str) -> Any:
        """The value as it came; None when absent."""
        return self._values.get(field)

    def boolean(self, field: str, default: bool = False) -> bool:
        value = self.raw(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(field, f"must be true or false, not {kind_of(value)}")
        return value

    def integer(self, field: str, minimum: int, maximum: int) -> int | None:
        value = self.raw(field)
        return None if value is None else check_integer(self.name(field), value, minimum, maximum)

    def number(self, field: str, default: float, minimum: float, maximum: float = math.inf) -> float:
        value = self.raw(field)
        return default if value is None else check_number(self.name(field), value, minimum, maximum)

    def string(self, field: str, *, max_chars: int) -> str | None:
        value = self.raw(field)
        if value is None:
            return None
        if not isinstance(value, str):
            self.fail(field, f"must be a string, not {kind_of(value)}")
        if len(value) > max_chars:
            self.fail(field, f"has {len(value)} characters, at most {max_chars} are allowed")
        return value

    def choice(self, field: str, default: str, allowed: Collection[str]) -> str:
        value = self.raw(field)
        if value is None:
            return default
        if not isinstance(value, str) or value not in allowed:
            self.fail(field, f"must be one of {', '.join(sorted(allowed))}")
        return value

    def array(self, field: str, *, max_items: int) -> list[Any]:
        value = self.raw(field)
        if value is None:
            return []
        if not isinstance(value, list):
            self.fail(field, f"must be an array, not {kind_of(value)}")
        if len(value) > max_items:
            self.fail(field, f"has {len(value)} items, at most {max_items} are allowed")
        return value

    def object(self, field: str) -> Fields | None:
        value = self.raw(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fail(field, f"must be an object, not {kind_of(value)}")
        return Fields(value, self.name(field))

    def items(self) -> list[tuple[str, Any]]:
        return list(self._values.items())


def check_integer(field: str, value: Any, minimum: int, maximum: int) -> int:
    """`value` as an integer in [minimum, maximum]; a boolean or 1.0 is none."""
    if type(value) is not int:
        raise invalid(field, f"must be an integer, not {kind_of(value)}")
    if not minimum <= value <= maximum:
        # An integer of thousands of digits is not worth its own error page.
        shown = value if abs(value) < 10**20 else "an integer of more than 20 digits"
        raise invalid(field, f"must be between {minimum} and {maximum}, not {shown}")
    return value


def check_number(field: str, value: Any, minimum: float, maximum: float = math.inf) -> float:
    """`value` as a finite float in [minimum, maximum]; a boolean is none."""
    if type(value) not in (int, float):
        raise invalid(field, f"must be a number, not {kind_of(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise invalid(field, "must be a finite number")
    if not minimum <= number <= maximum:
        allowed = f"at least {minimum:g}" if maximum == math.inf else f"between {minimum:g} and {maximum:g}"
        raise invalid(field, f"must be {allowed}, not {number:g}")
    return number
