"""What crosses a process boundary: ids, plans, Redis keys and entries, errors, configuration."""
