"""Measurements. Each script prints a short table and records a JSON file in `benchmarks/results/`."""
