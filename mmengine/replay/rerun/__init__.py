"""Serves a log's requests again, unchanged or under other settings."""
