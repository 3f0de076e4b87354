"""Which workers there are, and what is known of each: its state, its load, the blocks that it holds."""
