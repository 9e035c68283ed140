"""What runs on a GPU in one kernel where torch takes many. Not yet run on a GPU.

The modules *_kernels are written in Triton, which is imported with them and nowhere else; with
TRITON_INTERPRET=1 they run on a CPU too, which is how the tests look at their numbers.
"""

# torch's device types that they are compiled for; on any other one torch does their work.
DEVICE_TYPES = ("cuda",)
