"""GPU kernels in Triton, each of which replaces several torch kernels. Not yet run on a GPU.

The modules *_kernels contain the kernels. With TRITON_INTERPRET=1 the kernels also run on a CPU. In this
mode, the tests check the numbers that the kernels compute.
"""

# Device types for which the kernels are compiled; on other devices torch computes.
DEVICE_TYPES = ("cuda",)
