"""Checks a plot's file name before a command starts its work."""

from pathlib import Path

from mmengine.errors import ConfigError
from mmengine.extras import install_hint


def check_picture(path: Path, option: str) -> None:
    """Raise ConfigError if matplotlib is missing or does not support the suffix of `path`. The error names
    `option`.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # Lazy: only a picture needs it
    except ImportError:
        raise ConfigError(f"{option} needs matplotlib: {install_hint('plot')}") from None
    kinds = sorted(FigureCanvasAgg.get_supported_filetypes())
    if path.suffix.lstrip(".").lower() not in kinds:
        raise ConfigError(f"{option} {path}: the name must end in one of .{', .'.join(kinds)}")
