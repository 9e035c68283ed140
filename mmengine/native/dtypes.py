"""How the kernels call dtypes."""

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
