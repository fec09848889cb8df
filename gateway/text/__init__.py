"""Text ⇄ tokens: tokenizer, chat template, incremental detokenizer, stop strings. Only the gateway sees text."""
