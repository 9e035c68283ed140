"""An event-sourced inference engine for vision-language models.

    from mmengine import pipeline
    pipe = pipeline("image-text-to-text")
    pipe(text=[{"role": "user", "content": "What is a triangle?"}], max_new_tokens=32)

Importing this package is cheap: each name is loaded at its first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mmengine.extras import engine_hint
from mmengine.version import __version__

if TYPE_CHECKING:
    from mmengine.config import EngineConfig
    from mmengine.processing.fetch.fetcher import MediaFetcher
    from mmengine.processing.fetch.limits import FetchLimits
    from mmengine.request import SamplingParams
    from mmengine.serve.async_engine.async_engine import AsyncEngine
    from mmengine.serve.engine.engine import Engine
    from mmengine.serve.pipeline.pipeline import Pipeline, pipeline
    from mmengine.serve.prompt.prompt import Prompt
    from mmengine.structured_output.report.report import SchemaReport, check_schema

__all__ = [
    "AsyncEngine",
    "Engine",
    "EngineConfig",
    "FetchLimits",
    "MediaFetcher",
    "Pipeline",
    "Prompt",
    "SamplingParams",
    "SchemaReport",
    "__version__",
    "check_schema",
    "pipeline",
]

_HOMES = {
    "AsyncEngine": "mmengine.serve.async_engine.async_engine",
    "Engine": "mmengine.serve.engine.engine",
    "EngineConfig": "mmengine.config",
    "FetchLimits": "mmengine.processing.fetch.limits",
    "MediaFetcher": "mmengine.processing.fetch.fetcher",
    "Pipeline": "mmengine.serve.pipeline.pipeline",
    "Prompt": "mmengine.serve.prompt.prompt",
    "SamplingParams": "mmengine.request",
    "SchemaReport": "mmengine.structured_output.report.report",
    "check_schema": "mmengine.structured_output.report.report",
    "pipeline": "mmengine.serve.pipeline.pipeline",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mmengine' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        hint = engine_hint(error)
        if hint is None:
            raise
        raise ModuleNotFoundError(f"mmengine.{name} cannot be imported: {hint}", name=error.name) from error
    globals()[name] = value  # the next use of the name does not call this function
    return value
