"""Tokens and text: the tokenizer, text as it grows, and what is found in it: stop strings, reasoning, calls."""
