"""The life of one generation: its attempts on pairs of workers, and an account of its time. Plain state."""
