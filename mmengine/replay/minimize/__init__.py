"""Reduces a failing log to a smallest log with the same failure, and writes a pytest file for the failure."""
