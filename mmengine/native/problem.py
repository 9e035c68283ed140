"""Why the kernels cannot be used here."""


class NativeProblem(Exception):
    """Its text ends the line "CPU kernels are off: …"."""
