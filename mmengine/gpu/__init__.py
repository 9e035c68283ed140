"""Single GPU kernels for operations that take torch many kernels. Not yet run on a GPU.

The modules *_kernels are written in Triton and are the only ones that import it. With TRITON_INTERPRET=1 the
kernels run on a CPU too, which the tests use to check their numbers.
"""

# Device types that the kernels are compiled for; on other devices torch does the work.
DEVICE_TYPES = ("cuda",)
