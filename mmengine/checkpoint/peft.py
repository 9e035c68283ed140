"""Reads a LoRA adapter in PEFT's format: two files in an untrusted folder, read within size limits.

`adapter_config.json` contains the options. `adapter_model.safetensors` contains two matrices per changed
module: A [r, in], named `base_model.model.<module>.lora_A.weight`, and B [out, r], with `lora_B` in the name.
The adapter adds scale * B A to the module's weight. The scale is `lora_alpha / r`, or `lora_alpha / sqrt(r)`
with `use_rslora` (https://huggingface.co/docs/peft/developer_guides/checkpoint). Other PEFT features are
refused with an error that names the field. Pickled weights are never read. This module does not import torch.
"""

import hashlib
import io
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mmengine.checkpoint.fields import Fields
from mmengine.checkpoint.files import open_regular, read_json
from mmengine.checkpoint.tensors import FLOAT_BYTES, TensorEntry, read_header
from mmengine.errors import ModelError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"
MAX_CONFIG_BYTES = 2**20  # Limit for adapter_config.json; a typical file has about 1,000 bytes.
MAX_RANK = 512
MAX_TENSORS = 20_000  # Limit for tensors in an adapter; all linear layers of a 64-layer model need 900.
MAX_PATTERNS = 4096  # Limit for the entries of alpha_pattern and of rank_pattern.
PADDED = 16  # In memory, A and B are padded with rows to a multiple of this number of rows.
# Fields for unsupported PEFT features. Null, false and empty values count as absent.
_REFUSED = (
    *("use_dora", "modules_to_save", "lora_bias", "fan_in_fan_out", "layer_replication", "target_parameters"),
    *("trainable_token_indices", "alora_invocation_tokens", "use_qalora", "use_bdlora", "megatron_config"),
    *("arrow_config", "kasa_config", "velora_config", "monteclora_config"),
)
_INITS = ("gaussian", "eva", "orthogonal")  # Initialisations that do not change the model's own weights.
_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<which>[AB])\.weight", re.ASCII)
_PATTERN = re.compile(r"\^?[A-Za-z0-9_.]{1,300}", re.ASCII)


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The matrices `a` [rank, in] and `b` [out, rank] of a module, and the scale of their product."""

    a: TensorEntry
    b: TensorEntry
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def num_bytes(self, value_bytes: int) -> int:
        """Return the bytes that the padded pair takes in memory, with `value_bytes` per value."""
        (rank, k), n = self.a.shape, self.b.shape[0]
        rows_a, rows_b = (-(-rows // PADDED) * PADDED for rows in (rank, n))
        return (rows_a * (k + k % 2) + rows_b * (rank + rank % 2)) * value_bytes


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """A checked adapter.

    `digest`: SHA-256 of the options and the weights file. `pairs`: canonical module name -> its matrices.
    `data`: the bytes of the weights file, to which the offsets in `pairs` refer.
    """

    folder: Path
    digest: bytes
    pairs: Mapping[str, LoraPair]
    data: bytes

    def num_bytes(self, value_bytes: int) -> int:
        return sum(pair.num_bytes(value_bytes) for pair in self.pairs.values())

    @property
    def is_visual(self) -> bool:
        return any(module.startswith("visual.") for module in self.pairs)


def read_adapter(
    folder: Path,
    canonical_name: Callable[[str], str | None],
    modules: Mapping[str, tuple[int, int]],
    max_bytes: int,
    value_bytes: int,
) -> AdapterFiles:
    """Return the adapter in `folder`.

    `canonical_name`: a function from a model tensor's stored name to its canonical name. `modules`: canonical
    name -> (out, in), for each module that adapters may change. `max_bytes`: limit for the matrices in
    memory, with `value_bytes` per value. If an adapter exceeds the limit, only its header is read.

    Raises ModelError for an adapter that is missing, damaged, too large, not supported, or made for another
    model. The message names the file and the field or tensor.
    """
    config, path = _read_config(folder), folder / WEIGHTS_FILE
    try:
        _check_is_there(folder)
        with open_regular(path) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            entries = read_header(path, file, file_bytes, FLOAT_BYTES)
            _check_bytes(path, entries, file_bytes - file.tell())
            pairs = {
                module: _pair(path, config, *both, modules[module])
                for module, both in _by_module(path, entries, canonical_name, modules).items()
            }
            if (held := sum(pair.num_bytes(value_bytes) for pair in pairs.values())) > max_bytes:
                raise ModelError(
                    f"the adapter in {folder} takes {held} bytes; all adapters together may take "
                    f"{max_bytes} (lora_bytes): raise lora_bytes"
                )
            file.seek(0)
            data = file.read(file_bytes)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    if read_header(path, io.BytesIO(data), len(data), FLOAT_BYTES) != entries:
        raise ModelError(f"{path} changed while it was read; load it again")
    digest = hashlib.sha256(b"mmengine adapter 1")
    for content in (config.data, data):
        digest.update(hashlib.sha256(content).digest())
    return AdapterFiles(folder, digest.digest(), pairs, data)


@dataclass(frozen=True, slots=True)
class _Config:
    data: bytes
    rank: int
    alpha: float
    is_rslora: bool
    ranks: frozenset[int]
    alphas: dict[str, float]  # alpha_pattern: a key applies to modules whose name ends with the key.

    def scale(self, stored: str, rank: int) -> float:
        found = [alpha for name, alpha in self.alphas.items() if _ends_with(stored, name)]
        alpha = found[0] if found else self.alpha
        return alpha / math.sqrt(rank) if self.is_rslora else alpha / rank


def _ends_with(module: str, name: str) -> bool:
    if name.startswith("^"):
        return module == name[1:]
    return module == name or module.endswith("." + name)


def _read_config(folder: Path) -> _Config:
    path = folder / CONFIG_FILE
    values = read_json(path, max_bytes=MAX_CONFIG_BYTES)
    fields = Fields(values, path, "")
    kind = values.get("peft_type")
    if kind != "LORA":
        fields.fail(f"peft_type is {kind!r:.60}; only LORA adapters are supported")
    for name in _REFUSED:
        if values.get(name):
            fields.fail(
                f"{name} is {values[name]!r:.60}, which is not supported; train the adapter without it"
            )
    if values.get("bias", "none") != "none":
        fields.fail(
            f"bias is {values['bias']!r:.60}, but adapter biases are not supported; train it with bias none"
        )
    init = values.get("init_lora_weights", True)
    if init is not None and not isinstance(init, bool) and init not in _INITS:
        fields.fail(
            f"init_lora_weights is {init!r:.60}, which changes the model's own weights; save the adapter "
            "converted to plain LoRA (path_initial_model_for_weight_conversion)"
        )
    rank = fields.integer("r", 1, MAX_RANK)
    return _Config(
        json.dumps(values, sort_keys=True).encode(),
        rank,
        fields.number("lora_alpha", 8),
        fields.flag("use_rslora", False),
        frozenset({rank, *(_whole(fields, each) for each in _pattern(fields, "rank_pattern").values())}),
        {name: _number(fields, each) for name, each in _pattern(fields, "alpha_pattern").items()},
    )


def _pattern(fields: Fields, name: str) -> dict[str, object]:
    found = fields.child(name, optional=True).values
    if len(found) > MAX_PATTERNS:
        fields.fail(f"{name} has {len(found)} entries; the limit is {MAX_PATTERNS}")
    for key in found:
        if not _PATTERN.fullmatch(key):
            fields.fail(
                f"{name} names {key!r:.60}, which is not a module name; regular expressions are not supported"
            )
    return found


def _whole(fields: Fields, value: object) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        fields.fail(f"rank_pattern holds {value!r:.60}; a rank is an integer from 1 to {MAX_RANK}")
    return value


def _number(fields: Fields, value: object) -> float:
    return Fields({"alpha_pattern": value}, fields.path, fields.prefix).number("alpha_pattern", 0)


def _check_is_there(folder: Path) -> None:
    if (folder / WEIGHTS_FILE).is_file():
        return
    if (folder / PICKLED_FILE).exists():
        raise ModelError(
            f"{folder / PICKLED_FILE} is a pickle, which can run any code and is never read; save the "
            f"adapter as {WEIGHTS_FILE} (safe_serialization)"
        )
    raise ModelError(f"{folder} has no {WEIGHTS_FILE}; give the folder of a LoRA adapter in PEFT's format")


def _check_bytes(path: Path, entries: list[TensorEntry], data_bytes: int) -> None:
    """Raise ModelError for too many tensors, and for bytes that belong to no tensor."""
    if len(entries) > MAX_TENSORS:
        raise ModelError(f"{path} holds {len(entries)} tensors; the limit for an adapter is {MAX_TENSORS}")
    if data_bytes > sum(entry.num_bytes for entry in entries):
        raise ModelError(f"{path} has bytes that belong to no tensor; save the adapter again")


def _by_module(
    path: Path,
    entries: list[TensorEntry],
    canonical_name: Callable[[str], str | None],
    modules: Mapping[str, tuple[int, int]],
) -> dict[str, tuple[TensorEntry, TensorEntry]]:
    found: dict[str, dict[str, TensorEntry]] = {}
    for entry in entries:
        key = _KEY.fullmatch(entry.stored_name)
        if key is None:
            raise ModelError(
                f"{path}: tensor {entry.stored_name} is not a LoRA matrix; save the adapter without it"
            )
        name = canonical_name(f"{key['module']}.weight")
        module = (name or "").removesuffix(".weight")
        if module not in modules:
            raise ModelError(
                f"{path}: tensor {entry.stored_name} changes no module of this model that adapters may "
                "change (linear layers of its attention, its MLPs and its vision tower); it was trained for "
                "another model, or on a module that is not served"
            )
        both = found.setdefault(module, {})
        if key["which"] in both:
            raise ModelError(
                f"{path}: tensor {entry.stored_name} is stored twice, under two names for its module"
            )
        both[key["which"]] = entry
    if not found:
        raise ModelError(f"{path} holds no matrices, so the adapter would change nothing")
    for both in found.values():
        if len(both) != 2:
            (which, entry), *_ = both.items()
            other = "B" if which == "A" else "A"
            raise ModelError(f"{path}: tensor {entry.stored_name} has no lora_{other} matrix")
    return {module: (both["A"], both["B"]) for module, both in found.items()}


def _pair(path: Path, config: _Config, a: TensorEntry, b: TensorEntry, sizes: tuple[int, int]) -> LoraPair:
    out, inputs = sizes
    rank = a.shape[0] if a.shape else 0
    if rank not in config.ranks or a.shape != (rank, inputs):
        ranks = " or ".join(map(str, sorted(config.ranks)))
        raise ModelError(
            f"{path}: tensor {a.stored_name} has shape {list(a.shape)}; the model and {CONFIG_FILE} require "
            f"[{ranks}, {inputs}]"
        )
    if b.shape != (out, rank):
        raise ModelError(
            f"{path}: tensor {b.stored_name} has shape {list(b.shape)}; the model and its lora_A require "
            f"[{out}, {rank}]"
        )
    found = _KEY.fullmatch(a.stored_name)
    assert found is not None
    return LoraPair(a, b, config.scale(found["module"], rank))
