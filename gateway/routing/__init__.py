"""Which workers a request goes to, whether they would be in time for it, and the shell that carries that out."""
