"""Who is let in at the HTTP port: connections, keys, rate limits, origins, and the guard around every handler."""
