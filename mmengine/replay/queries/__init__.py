"""Queries over a log: requests, steps, states, and reasons."""
