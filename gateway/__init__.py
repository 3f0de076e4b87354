"""The gateway: speaks the OpenAI API, chooses workers, runs each request's handoff. No torch, no engine."""
