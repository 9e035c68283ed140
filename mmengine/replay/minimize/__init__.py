"""Reduces a failing log to the smallest log that still has the failure, and writes it with a pytest file."""
