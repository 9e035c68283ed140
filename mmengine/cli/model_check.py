"""Implements `mmengine model check`: finds the plugin that serves a model, and the memory that the model
needs.

Reads only the model's config and its list of files.
"""

import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mmengine.checkpoint.model_files import read_model_json
from mmengine.cli.logs.printing import print_json, printable
from mmengine.errors import ConfigError, ModelError
from mmengine.models.layer_groups import block_groups
from mmengine.models.loader import resolve_description
from mmengine.models.plugin import ModelPlugin
from mmengine.models.registry import choose_plugin, load_plugins
from mmengine.models.spec import ModelSpec

VALUE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
DESCRIBED, HOSTED = "described", "transformers"
NOT_HOSTED = (
    "tensor_parallel and batch_invariant",
    "LoRA adapters",
    "draft heads (n-gram, suffix and grammar drafts work)",
)


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What `mmengine model check` found. Sizes are in bytes; -1 if unknown.

    `refused`: why the model cannot be served, or "" if it can. `unsupported`: requests or features that the
    implementation refuses. `notes`: properties of the model, such as limits on prompts. `context`: number of
    tokens for which `kv_bytes` is computed. `kv_bytes_per_token`: the sum over all layers.
    """

    model: str
    architecture: str
    implementation: str
    refused: str = ""
    unsupported: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    weight_bytes: int = -1
    context: int = 0
    kv_bytes_per_token: int = -1
    kv_bytes: int = -1
    command: str = ""
    facts: dict[str, int] = field(default_factory=dict)


def check_model(name: str, *, context: int | None, dtype: str) -> ModelReport:
    """Return the report on a model. Raises ModelError if the model cannot be found or read, and ConfigError
    for an unknown dtype and for a context longer than the model's.
    """
    if dtype not in VALUE_BYTES:
        raise ConfigError(f"dtype must be one of {', '.join(VALUE_BYTES)}, not {dtype!r}")
    folder, weight_bytes = resolve_description(name)
    architecture = _architecture(folder)
    try:
        plugin, refusal = choose_plugin(folder)
        spec = _describe(plugin, folder)
    except ModelError as error:
        return ModelReport(name, architecture, "none", refused=error.text, weight_bytes=weight_bytes)
    is_described = plugin in load_plugins().values()
    if context is not None and context > spec.max_model_len:
        raise ConfigError(
            f"context is {context:,} tokens; {name} has {spec.max_model_len:,} positions: give a smaller one"
        )
    tokens = context or spec.max_model_len
    per_layer = 2 * spec.num_kv_heads * spec.head_dim * VALUE_BYTES[dtype]
    command = ["mmengine", "serve", name, *(["--set", f"max_model_len={tokens}"] if context else [])]
    notes = _notes(spec)
    if refusal:
        notes.append(f"mmengine's own implementation refuses it: {refusal}")
    return ModelReport(
        model=name,
        architecture=architecture,
        implementation=DESCRIBED if is_described else HOSTED,
        unsupported=() if is_described else NOT_HOSTED,
        notes=tuple(notes),
        weight_bytes=weight_bytes,
        context=tokens,
        kv_bytes_per_token=per_layer * spec.num_kv_layers,
        kv_bytes=per_layer * _kv_slots(spec, tokens),
        command=shlex.join(command),
        facts={"layers": spec.num_layers, "KV layers": spec.num_kv_layers, "positions": spec.max_model_len},
    )


def _architecture(folder: Path) -> str:
    names = read_model_json(folder, "config.json").get("architectures")
    found = names if isinstance(names, list) else []
    return ", ".join(str(each)[:100] for each in found[:8])


def _describe(plugin: ModelPlugin, folder: Path) -> ModelSpec:
    describe = getattr(plugin, "describe", None)
    if describe is None:
        raise ModelError(f"{type(plugin).__name__} does not tell a model's sizes without its weights")
    spec = describe(folder)
    assert isinstance(spec, ModelSpec)
    return spec


def _kv_slots(spec: ModelSpec, tokens: int) -> int:
    """Return how many KV slots a row with `tokens` tokens needs in all layers. Sliding-window layers with a
    separate block group need slots only for the window.
    """
    groups = block_groups(spec, tokens)
    held = [len(group.layers) * (min(group.window, tokens) or tokens) for group in groups]
    return sum(held) or spec.num_kv_layers * tokens


def _notes(spec: ModelSpec) -> list[str]:
    notes = []
    if spec.whole_prompt:
        notes.append("a prompt is computed in one step: prompts above token_budget are refused")
    if spec.atomic_runs:
        notes.append("an image is computed in one step: images above token_budget are refused")
    windows = sum(layer.window > 0 for layer in spec.attention)
    if windows:
        notes.append(f"{windows} of {spec.num_layers} layers have a window")
    if spec.state is not None:
        notes.append(f"{spec.state.num_layers} of {spec.num_layers} layers have recurrent states")
    return notes


def print_report(report: ModelReport, as_json: bool) -> None:
    """Print the report as lines, or as one JSON object."""
    if as_json:
        print_json(asdict(report))
        return
    lines = {
        "model": report.model,
        "architecture": report.architecture,
        "served by": f"nothing: {report.refused}" if report.refused else report.implementation,
        "not supported": "; ".join(report.unsupported),
        "rules": "; ".join(report.notes),
        "weights": _size(report.weight_bytes),
    }
    if not report.refused:
        per_token = f"{report.kv_bytes_per_token:,} bytes per token"
        if report.kv_bytes < report.kv_bytes_per_token * report.context:
            per_token += ", freed behind windows"
        lines["KV"] = f"{_size(report.kv_bytes)} for {report.context:,} tokens ({per_token})"
        lines["sizes"] = ", ".join(f"{value:,} {name}" for name, value in report.facts.items())
        lines["serve with"] = report.command
    for name, text in lines.items():
        if text:
            print(f"{name:<14} {printable(text)}")


def _size(num_bytes: int) -> str:
    if num_bytes <= 0:
        return "unknown"
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:,.1f} MiB"
