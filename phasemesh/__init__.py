"""The command line: launcher of a local stack, model fetch, doctor."""
