"""`mmengine env`: lists versions, devices and kernels, for a bug report or to explain a slow run."""

import platform
import sys
from importlib import metadata
from typing import Annotated

import typer

from mmengine.errors import ModelError
from mmengine.version import __version__

PACKAGES = (
    "torch",
    "numpy",
    "tokenizers",
    "safetensors",
    "pillow",
    "av",
    "msgspec",
    "transformers",
    "flashinfer-python",
)


def env(
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show versions, devices, attention backends, CPU kernels, model plugins and the included checkpoint."""
    from mmengine.runtime.startup import capabilities  # Lazy: torch

    facts = {
        "mmengine-vl": __version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        **{name: _version(name) for name in PACKAGES},
        "GPUs": "; ".join(capabilities.gpus()) or f"none: {capabilities.no_gpu()}",
        "threads": _threads(),
        "attention": capabilities.automatic_attention(),
        **{f"attention {name}": text for name, text in capabilities.attention().items()},
        "tensor parallel": capabilities.tensor_parallel(),
        "CPU kernels": _kernels(),
        "quantised weights": _quantised(),
        "model plugins": _plugins(),
        "included checkpoint": _checkpoint(),
        "clash": clash() or "none",
    }
    if json_output:
        import json

        print(json.dumps(facts))
        return
    width = max(map(len, facts))
    for name, fact in facts.items():
        print(f"{name:<{width}}  {fact}")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _threads() -> str:
    from mmengine.runtime.device.threads import choose_threads  # Lazy import.

    threads, small = choose_threads(), choose_threads(hidden_size=1)
    beside = f"; {small.count} for a model with {small.why}" if small != threads else ""
    return f"{threads.count} ({threads.why}){beside}"


def _kernels() -> str:
    from mmengine.native.library import describe  # Lazy: it may compile

    return describe()


def _quantised() -> str:
    import torch  # Lazy import.

    from mmengine.checkpoint.gguf.types import BLOCKS
    from mmengine.models.held_weights import holds_blocks
    from mmengine.models.reader import holds_codes

    cpu = torch.device("cpu")
    if not holds_codes(cpu, torch.bfloat16):
        return "dequantised: there are no CPU kernels"
    dtypes = [name for name in ("bfloat16", "float32") if holds_blocks(cpu, getattr(torch, name))]
    types = f"{', '.join(sorted(BLOCKS))} stay codes in {' and '.join(dtypes)}"
    gguf = f"GGUF's {types}" if dtypes else "GGUF's K-quants are dequantised"
    return f"FP8, int8 and int4 stay codes on a CPU in bfloat16, elsewhere they are dequantised; {gguf}"


def _plugins() -> str:
    from mmengine.models.registry import load_plugins  # Lazy: numpy

    try:
        plugins = load_plugins()
    except ModelError as error:
        return f"broken: {error}"
    return ", ".join(plugins) or "none"


def _checkpoint() -> str:
    from mmengine.models.loader import resolve_folder  # Lazy import.

    try:
        folder = resolve_folder(None)
    except ModelError as error:
        return f"none: {error}"
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return f"{folder} ({size / 1e6:.1f} MB)"


def clash() -> str:
    """Return a warning if PyPI's `mmengine`, another project, is installed too, otherwise ""."""
    try:
        version = metadata.version("mmengine")
    except metadata.PackageNotFoundError:
        return ""
    return (
        f"OpenMMLab's mmengine {version} is installed in {sys.prefix} beside mmengine-vl; both import as "
        "`mmengine`, so files of one hide the other's: install them into separate environments"
    )
