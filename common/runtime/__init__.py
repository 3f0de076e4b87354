"""Process code that every role shares: settings, life cycle, control channel, probes, metrics, checkpoints."""
