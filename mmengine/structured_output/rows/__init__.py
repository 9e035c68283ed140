"""Compiles requests' grammars, and stores each row's grammar state."""
