"""Typed reading of one JSON object of a checkpoint, where every refusal names the field."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from wire.errors import ModelUnsupported


class ConfigFields:
    """One JSON object. `where` begins every message: `config.json`, `config.json: rope_scaling`, …

    A field that is absent or null takes `default`; where there is none, it is required.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    @classmethod
    def read(cls, path: Path) -> ConfigFields:
        """Raises ModelUnsupported when the file is missing or is not one JSON object."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelUnsupported(f"{path}: {error}", param=path.name) from error
        if not isinstance(values, dict):
            raise ModelUnsupported(f"{path}: not a JSON object", param=path.name)
        return cls(values, path.name)

    def refuse(self, name: str, reason: str) -> ModelUnsupported:
        """The error to raise about a field."""
        return ModelUnsupported(f"{self.where}: {name}={self.values.get(name)!r}: {reason}", param=name)

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refuse(name, "not a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.refuse(name, "not a positive number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A positive number, or None when absent or null."""
        return None if self.values.get(name) is None else self.number(name)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, "not true or false")
        return value

    def require(self, name: str, only: object) -> None:
        """The field may be absent, null, or the one value we implement."""
        if self._value(name, only) != only:
            raise self.refuse(name, f"only {only!r} is implemented")

    def reject_unknown(self, known: Collection[str]) -> None:
        """A field nobody here reads may change the result, unless it is switched off (null, false or empty)."""
        for name, value in self.values.items():
            switched_off = value is None or value is False or value in ({}, [])
            if name not in known and not switched_off:
                raise self.refuse(name, "this field is not implemented")

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelUnsupported(f"{self.where}: {name} is missing", param=name)
        return value
