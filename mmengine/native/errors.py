"""The error that is raised if the CPU kernels cannot be used on this machine."""


class NativeKernelsError(Exception):
    """The kernels cannot be compiled or loaded. The log line "CPU kernels are off …" ends with this error's
    text.
    """
