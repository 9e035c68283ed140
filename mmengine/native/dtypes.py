"""The numbers that stand for dtypes in calls of the CPU kernels."""

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
