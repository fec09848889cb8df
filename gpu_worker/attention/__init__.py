"""Attention over paged KV: one port, several backends."""
