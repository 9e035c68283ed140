"""The error that is raised if the CPU kernels cannot be used on this machine."""


class NativeKernelsError(Exception):
    """The CPU kernels cannot be compiled or loaded."""
