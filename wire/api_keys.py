"""API keys as PHASEMESH_API_KEYS lists them, for the gateway that asks for one and a local client that sends one."""

from __future__ import annotations


def split_api_keys(comma_separated: str | None) -> list[str]:
    """The keys, without the spaces around them; empty ones are none."""
    stripped = (key.strip() for key in (comma_separated or "").split(","))
    return [key for key in stripped if key]


def first_api_key(comma_separated: str | None) -> str | None:
    """The one that local clients send; None when there is none."""
    return next(iter(split_api_keys(comma_separated)), None)
