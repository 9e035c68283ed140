"""Reduces a failing log to the smallest log that still has the same failure."""
