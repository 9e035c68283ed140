"""Integer codes of dtypes in calls of the CPU kernels."""

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
