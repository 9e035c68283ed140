"""GPU kernels that each replace many torch kernels. Not yet run on a GPU.

The modules *_kernels contain Triton kernels. With TRITON_INTERPRET=1 the kernels run on a CPU too, which the
tests use to check their numbers.
"""

# Device types that the kernels are compiled for; on other devices torch computes.
DEVICE_TYPES = ("cuda",)
