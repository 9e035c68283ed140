"""Asking a log: requests, steps, states, and why."""
