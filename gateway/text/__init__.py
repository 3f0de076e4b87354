"""Tokens and text: the tokenizer, growing texts, and what is found in them: stop strings, reasoning, function calls."""
