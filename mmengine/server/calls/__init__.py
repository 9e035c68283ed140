"""Calls that outlive their connection: identified, detached, stored, recovered from the log, and
traced."""
