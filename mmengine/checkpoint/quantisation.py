"""Reads the quantisation in config.json, and groups the tensors of each quantised matrix.

Does not import torch.
"""

from pathlib import Path

from mmengine.checkpoint import float_codes, fp8, int4
from mmengine.checkpoint.fields import Fields
from mmengine.checkpoint.files import read_json
from mmengine.checkpoint.float_codes import FloatCodes
from mmengine.checkpoint.fp8 import Block
from mmengine.checkpoint.int4 import GROUPS, Int4, Layout
from mmengine.checkpoint.tensors import TensorEntry
from mmengine.errors import ModelError

STORED_BYTES = {**fp8.STORED_BYTES, **int4.STORED_BYTES, **float_codes.STORED_BYTES}
# Older ModelOpt versions describe the quantisation in this file, not in config.json.
MODELOPT_FILE = "hf_quant_config.json"
# With these values of compressed-tensors' ActivationOrdering, the columns are stored in their usual order.
_IN_ORDER = ("weight", "static")
SUPPORTED = (
    "fp8 with a weight_block_size (the *-FP8 folders of the hub); fp8 and nvfp4 from compressed-tensors "
    '("float-quantized", "nvfp4-pack-quantized") and modelopt; and 4 bits in groups of 32, 64 or 128 from '
    'compressed-tensors ("pack-quantized"), gptq and awq ("gemm") are supported'
)


def quantisation_of(root: Fields) -> Block | Int4 | FloatCodes | None:
    """Return the quantisation in a config.json, or None for unquantised weights.

    Raises ModelError for unsupported quantisation.
    """
    if root.values.get("quantization_config") is None:
        return None
    how = root.child("quantization_config")
    method = how.values.get("quant_method")
    if method not in (fp8.METHOD, "compressed-tensors", "gptq", "awq", *float_codes.METHODS):
        root.fail(f"quantization_config.quant_method {repr(method)[:60]} is not supported; {SUPPORTED}")
    try:
        if method == fp8.METHOD:
            return fp8.block_of(how)
        if (found := float_codes.layout_of(how)) is not None:
            return found
        return _compressed(how) if method == "compressed-tensors" else _packed(how, method)
    except ModelError as error:
        raise ModelError(f"{error}; {SUPPORTED}") from None


def with_quantised(folder: Path, entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors by canonical name. Each quantised matrix becomes a single entry with its scales and
    zeros.

    Raises ModelError for invalid quantised tensors, and for quantised tensors if config.json names no
    quantisation.
    """
    path = folder / "config.json"
    found = quantisation_of(Fields(read_json(path), path, "")) if path.is_file() else None
    if found is None and (folder / MODELOPT_FILE).is_file():
        found = _modelopt(folder / MODELOPT_FILE)
    if isinstance(found, FloatCodes):
        entries = float_codes.with_codes(entries, found)
    float_codes.check_bytes(entries)
    if isinstance(found, Int4):
        entries = int4.with_codes(entries, found)
    int4.check_words(entries)
    if isinstance(found, FloatCodes):
        return entries
    return fp8.with_scales(folder, entries, found if isinstance(found, Block) else None)


def _modelopt(path: Path) -> FloatCodes | None:
    """Return the quantisation in ModelOpt's separate file."""
    root = Fields(read_json(path), path, "")
    try:
        return float_codes.layout_of(root.child("quantization"))
    except ModelError as error:
        raise ModelError(f"{error}; {SUPPORTED}") from None


def _packed(how: Fields, layout: Layout) -> Int4:
    _only(how, "bits", 4)
    _only(how, "desc_act", False, absent=True)
    if layout == "awq":
        _form(how, ("version", "format"), ("gemm",))
        return Int4(layout, _group(how), True)
    kind = _form(how, ("checkpoint_format", "format"), ("gptq", "gptq_v2"))
    return Int4(layout, _group(how), True, 1 if kind == "gptq" else 0)


def _form(how: Fields, names: tuple[str, str], known: tuple[str, ...]) -> str:
    """Return the packing format: the lower-case value of the first field in `names` that exists, or known[0].

    Like transformers' GPTQConfig and AwqConfig, prefers the older field name and ignores case. Raises
    ModelError if the value is not in `known`.
    """
    name = next((each for each in names if how.values.get(each) is not None), None)
    if name is None:
        return known[0]
    found = str(how.values[name]).lower()
    if found not in known:
        said = " and ".join(map(repr, known))
        how.fail(f"{how.prefix}{name} {repr(how.values[name])[:60]} is not supported, only {said}")
    return found


def _compressed(how: Fields) -> Int4:
    _only(how, "format", "pack-quantized")
    groups = how.child("config_groups")
    if len(groups.values) != 1:
        how.fail(
            f"{groups.prefix[:-1]} has {len(groups.values)} groups; only one group for all matrices is "
            "supported"
        )
    group = groups.child(next(iter(groups.values)))
    if group.values.get("input_activations") is not None:
        how.fail(f"{group.prefix}input_activations are quantised; only quantised weights are supported")
    weights = group.child("weights")
    _only(weights, "num_bits", 4)
    _only(weights, "type", "int")
    _only(weights, "strategy", "group")
    order = weights.values.get("actorder")
    if order is not None and order is not False and order not in _IN_ORDER:
        name = f"{weights.prefix}actorder {repr(order)[:60]}"
        weights.fail(f"{name} is not supported: it reorders columns between groups; use weight or static")
    return Int4("compressed-tensors", _group(weights), not weights.flag("symmetric", True))


def _group(how: Fields) -> int:
    size = how.values.get("group_size")
    if type(size) is not int or size not in GROUPS:
        how.fail(
            f"{how.prefix}group_size {repr(size)[:60]} is not supported; use {', '.join(map(str, GROUPS))}"
        )
    return size


def _only(how: Fields, name: str, wanted: object, *, absent: bool = False) -> None:
    found = how.values.get(name)
    if found is None and (absent or wanted is None):
        return
    if found != wanted or isinstance(found, bool) != isinstance(wanted, bool):
        how.fail(f"{how.prefix}{name} {repr(found)[:60]} is not supported, only {wanted!r}")
