"""HTTP parts that do not depend on the request's kind: bodies, errors, event streams, request ids, certificates."""
