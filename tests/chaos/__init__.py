"""Faults, brought about on purpose, in every state of the handoff."""
