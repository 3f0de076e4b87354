"""Moving KV blocks between two workers: leases at the source, pulls at the sink, transports between them."""
