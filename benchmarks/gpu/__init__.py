"""What a GPU is measured by: `python -m benchmarks.gpu`."""
