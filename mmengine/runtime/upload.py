"""Host arrays to device tensors without waiting for the device."""

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """`array` as a tensor on `device`.

    On a CPU the tensor shares the array's memory, unless that may not be written to. On CUDA the copy
    goes through pinned memory, whose allocator keeps it until the copy is done (not yet run on a GPU).
    """
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_into(array: np.ndarray, target: torch.Tensor) -> torch.Tensor:
    """Write `array` to the beginning of `target`, which stays where it is; gives that part."""
    tensor = torch.from_numpy(array)
    if target.device.type != "cpu":
        tensor = tensor.pin_memory()
    return target[: len(array)].copy_(tensor, non_blocking=True)
