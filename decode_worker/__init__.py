"""The decode role: pulls prompts' KV blocks and generates tokens with iteration-level continuous batching."""
