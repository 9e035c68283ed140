"""GPU kernels in Triton that each replace several torch kernels. Not yet run on a GPU.

The modules *_kernels contain the kernels. With TRITON_INTERPRET=1 the kernels also run on a CPU, which the
tests use to check the numbers that the kernels compute.
"""

# Device types that the kernels are compiled for; on other devices torch computes.
DEVICE_TYPES = ("cuda",)
