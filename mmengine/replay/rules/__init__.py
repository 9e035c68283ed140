"""The rules that each logged decision must keep, one module for each large decision."""
