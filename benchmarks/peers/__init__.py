"""Other serving systems, started on the same weights and cores as Baton, for comparison."""
