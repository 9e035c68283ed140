"""The error for kernels that cannot be used on this machine."""


class NativeKernelsError(Exception):
    """Kernels cannot be compiled or loaded. The text ends the log line "CPU kernels are off: …"."""
