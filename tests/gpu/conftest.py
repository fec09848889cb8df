"""Tiny checkpoints, as in tests/model."""

from __future__ import annotations

from tests.model.conftest import checkpoint, reference

__all__ = ["checkpoint", "reference"]
