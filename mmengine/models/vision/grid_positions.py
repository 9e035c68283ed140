"""Coordinates of a frame's patches, and their shares of the learned positions, from the frame's grid
alone."""

import numpy as np


def patch_coordinates(height: int, width: int, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """Return row and column (int64 [height * width]) for each patch in a frame, in windows of merge x
    merge."""
    windows = np.arange(height * width).reshape(height // merge, merge, width // merge, merge)
    return np.divmod(windows.swapaxes(1, 2).reshape(-1), width)


def interpolation(
    rows: np.ndarray, columns: np.ndarray, height: int, width: int, num_positions: int
) -> tuple[np.ndarray, np.ndarray]:
    """Interpolate bilinearly, with corners aligned, from the learned square of positions to a frame's grid.
    Returns indices int64 [n, 4] into the square and weights float32 [n, 4].
    """
    side = round(num_positions**0.5)
    row_taps, row_shares = _axis_taps(rows, height, side)
    column_taps, column_shares = _axis_taps(columns, width, side)
    taps = row_taps[:, :, None] * side + column_taps[:, None, :]
    shares = row_shares[:, :, None] * column_shares[:, None, :]
    return taps.reshape(-1, 4), shares.reshape(-1, 4)


def _axis_taps(index: np.ndarray, size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    source = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    floor = np.floor(source)
    fraction = source - floor
    low = floor.astype(np.int64)
    taps = np.stack((low, np.minimum(low + 1, side - 1)), 1)
    return taps, np.stack((1 - fraction, fraction), 1)
