"""What becomes of a schema: exact, approximated and how, or refused and why."""
