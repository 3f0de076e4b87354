"""What operators do with the workers, on a port of its own, and what stands before it."""
