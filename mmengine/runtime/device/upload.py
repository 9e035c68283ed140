"""Host arrays to device tensors without waiting for the device, and back, which waits."""

from collections.abc import Sequence

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


def upload_columns(*columns: np.ndarray, device: torch.device) -> torch.Tensor:
    """Columns [r] of one dtype as a tensor [len(columns), r, 1] on `device`, in one copy."""
    return upload(np.stack(columns), device)[:, :, None]


def upload_joined(arrays: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
    """Arrays of one dtype and width as one tensor on `device`. For CUDA they are joined where the copy
    begins, in pinned memory: pixels are many bytes (not yet run on a GPU)."""
    if device.type == "cpu":
        return upload(arrays[0] if len(arrays) == 1 else np.concatenate(arrays), device)
    return _joined_pinned(arrays).to(device, non_blocking=True)


def upload_joined_into(arrays: Sequence[np.ndarray], target: torch.Tensor) -> None:
    """Write arrays of one dtype and width, joined as by `upload_joined`, to the beginning of `target`."""
    if target.device.type != "cpu":
        joined = _joined_pinned(arrays)
        target[: len(joined)].copy_(joined, non_blocking=True)
        return
    np.concatenate(arrays, out=target.numpy()[: sum(map(len, arrays))])


def _joined_pinned(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    shape = (sum(map(len, arrays)), *arrays[0].shape[1:])
    dtype = torch.from_numpy(arrays[0][:0].copy()).dtype
    pinned = torch.empty(shape, dtype=dtype, pin_memory=True)
    np.concatenate(arrays, out=pinned.numpy())
    return pinned


def upload_into(array: np.ndarray, target: torch.Tensor) -> torch.Tensor:
    """Write `array` to the beginning of `target`, which stays where it is; gives that part."""
    tensor = torch.from_numpy(array)
    if target.device.type != "cpu":
        tensor = tensor.pin_memory()
    return target[: len(array)].copy_(tensor, non_blocking=True)


def fetch(tensor: torch.Tensor) -> np.ndarray:
    """Values of `tensor`, for which the device is waited for. On a CPU they share its memory."""
    return tensor.cpu().numpy()
