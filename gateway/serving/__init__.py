"""One generation and its life: the attempts at it, on pairs of workers, and what its time is spent on. Plain state."""
