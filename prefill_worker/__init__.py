"""The prefill role: computes prompts in chunks, samples first tokens, offers the KV blocks."""
