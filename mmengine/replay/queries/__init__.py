"""Queries over a log: its requests and steps, a state at a record, and the reasons for a request's delays."""
