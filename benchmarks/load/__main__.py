"""`python -m benchmarks.load`, and `baton bench`."""

from benchmarks.load.cli import main

if __name__ == "__main__":
    main()
