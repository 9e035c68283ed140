"""Runs a log's requests again, with the same or with changed settings."""
