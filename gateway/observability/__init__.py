"""Observability of requests: metrics, a log line for each event, traces, and the last minutes for the dashboard."""
