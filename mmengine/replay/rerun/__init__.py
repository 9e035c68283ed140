"""Runs a log's requests again, with the log's settings or with changed settings, and predicts their
latencies.
"""
