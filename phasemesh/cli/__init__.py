"""The `phasemesh` command: one module per subcommand, each with `add(subparsers)` and a handler."""
