"""The parts of a worker that do not depend on its role."""
