"""Real processes, sockets and transports, and a real, tiny model."""
