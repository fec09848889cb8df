"""KV below a worker's device pages: host memory, disk, Redis. docs/kv-tiers.md says what goes where and why."""
