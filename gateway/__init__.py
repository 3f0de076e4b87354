"""The gateway: speaks the OpenAI API, chooses workers, runs each request's handoff. A CPU image: no torch, no engine."""
