"""The API keys a gateway accepts, as its clients here read them."""

from __future__ import annotations


def first_key(api_keys: str | None) -> str | None:
    """The first of comma-separated API keys, which local clients send."""
    return api_keys.split(",")[0].strip() if api_keys else None
