"""Copies host arrays to a device without waiting for the device. `fetch` copies a tensor back and waits."""

from collections.abc import Sequence

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return `array` as a tensor on `device`.

    On a CPU the tensor shares the array's memory, unless the array is read-only. On CUDA the copy goes
    through pinned memory (not yet run on a GPU). torch reuses this memory only after the copy has finished.
    """
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_columns(*columns: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy arrays [r] with the same dtype to `device` in a single transfer. Returns a tensor [len(columns),
    r, 1].
    """
    return upload(np.stack(columns), device)[:, :, None]


def upload_joined(arrays: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
    """Copy arrays with the same dtype and width to `device` as one tensor, concatenated along the first axis.

    For CUDA the arrays are concatenated directly in pinned memory (not yet run on a GPU).
    """
    if device.type == "cpu":
        return upload(arrays[0] if len(arrays) == 1 else np.concatenate(arrays), device)
    return _joined_pinned(arrays).to(device, non_blocking=True)


def upload_joined_into(arrays: Sequence[np.ndarray], target: torch.Tensor) -> None:
    """Write the concatenated arrays to the start of `target` (see `upload_joined`)."""
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
    """Write `array` to the start of `target`, without a device allocation. Returns the written part."""
    tensor = torch.from_numpy(array)
    if target.device.type != "cpu":
        tensor = tensor.pin_memory()
    return target[: len(array)].copy_(tensor, non_blocking=True)


def fetch(tensor: torch.Tensor) -> np.ndarray:
    """Wait for the device, and return `tensor`'s values.

    On a CPU the array shares the tensor's memory.
    """
    return tensor.cpu().numpy()
