"""KV between workers: whole hash units, pulled by the worker that wants them (docs/kv-transfer.md)."""
