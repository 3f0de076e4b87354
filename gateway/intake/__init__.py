"""From a request's body to what is to be generated: its form, its meaning, and what its answer must follow."""
