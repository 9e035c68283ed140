"""Serves a log's requests again: as they were, or under other settings."""
