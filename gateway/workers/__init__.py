"""The workers and their state: which exist, their load, and the blocks that they hold."""
