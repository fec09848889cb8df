"""PHASEMESH_API_KEYS, as both ends read it."""

from __future__ import annotations

import pytest

from wire.api_keys import first_api_key, split_api_keys


@pytest.mark.parametrize(
    ("listed", "keys"),
    [(None, []), ("", []), (" , ", []), ("a", ["a"]), (" a ,b", ["a", "b"]), (",a", ["a"])],
)
def test_keys_are_what_stands_between_commas(listed: str | None, keys: list[str]) -> None:
    assert split_api_keys(listed) == keys
    assert first_api_key(listed) == (keys[0] if keys else None)
