"""Checks for commands that draw pictures into files."""

from pathlib import Path

from mmengine.errors import ConfigError
from mmengine.extras import install_hint


def check_picture(path: Path, option: str) -> None:
    """Raise ConfigError naming `option` if matplotlib is missing or the file's suffix is not a picture
    format.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # Lazy: only a picture needs it
    except ImportError:
        raise ConfigError(f"{option} needs matplotlib: {install_hint('plot')}") from None
    kinds = sorted(FigureCanvasAgg.get_supported_filetypes())
    if path.suffix.lstrip(".").lower() not in kinds:
        raise ConfigError(f"{option} {path}: the name must end in one of .{', .'.join(kinds)}")
