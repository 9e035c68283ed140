"""GPU kernels in Triton. Each kernel replaces several torch kernels. Not yet run on a GPU.

The modules *_kernels contain the kernels. With TRITON_INTERPRET=1 the kernels run on a CPU, where tests check
their results.
"""

# Device types for which the kernels are compiled; other devices use torch's operations.
DEVICE_TYPES = ("cuda",)
