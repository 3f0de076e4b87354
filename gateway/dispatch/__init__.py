"""All requests over all workers: the links to the workers, the placement of requests, and the dispatcher, which carries
out what is decided."""
