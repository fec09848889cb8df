"""Strict JSON: what RFC 8259 calls valid and every reader understands the same way. Pure.

Refused beside plain syntax errors: invalid UTF-8, lone surrogates, NaN and Infinity, a name given twice in one
object, nesting beyond what the parser can follow, and anything but an object at the top.
"""

from __future__ import annotations

import array
import json
import re
from collections import Counter
from typing import Any, NoReturn

from wire.errors import InvalidRequest

LONG_LIST = 1024
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse a request body. Raises InvalidRequest saying what is wrong with it."""
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_unique_names, parse_constant=_refuse_constant)
        if _SURROGATE_ESCAPE.search(raw):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8 (byte {error.start})") from error
    except UnicodeEncodeError as error:
        raise InvalidRequest("the body holds a lone surrogate, which is no character") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    except ValueError as error:  # a syntax error, or an integer of thousands of digits
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


def parse_compact(raw: bytes) -> dict[str, Any]:
    """parse_object for another process: long lists of integers come as arrays, which cost next to nothing to send."""
    return {name: _compact(value) for name, value in parse_object(raw).items()}


def _compact(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    if len(value) >= LONG_LIST and set(map(type, value)) == {int}:
        try:
            return array.array("q", value)
        except OverflowError:  # an integer beyond 64 bits; validation names it
            return value
    return [_compact(item) for item in value]


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise InvalidRequest(f"{twice[:64]!r} is given twice in one object", param=twice[:64])
    return found


def _refuse_constant(literal: str) -> NoReturn:
    raise InvalidRequest(f"the body is not valid JSON: {literal} is not a JSON number")
