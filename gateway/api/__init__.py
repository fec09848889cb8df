"""The OpenAI-compatible HTTP API: strict validation in, whole answers and server-sent events out."""
