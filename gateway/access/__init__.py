"""Access control at the HTTP port: connections, API keys, rate limits, origins, and the guard around every handler."""
