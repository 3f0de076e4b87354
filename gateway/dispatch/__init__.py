"""Routing: the workers that a request goes to, whether they can serve it in time, and the dispatcher that acts on
it."""
