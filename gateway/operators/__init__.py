"""The operators' API on a port of its own, and its guard."""
