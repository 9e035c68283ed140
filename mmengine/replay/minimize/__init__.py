"""Reduces a failing log to the smallest log with the same failure."""
