"""What HTTP needs whatever is asked: bodies, errors, event streams, names of requests, certificates."""
