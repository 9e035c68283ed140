"""Builds a transformers model on the meta device, and loads its weights with mmengine's reader.

The reader checks names, shapes and file sizes before it allocates memory. transformers' conversion mapping
renames tensors, and joins or splits them. If a linear layer's matrix is a single stored tensor, it is packed
for the CPU kernels while it is read, to save memory.
"""

import ctypes
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from mmengine.checkpoint.tensors import TensorEntry
from mmengine.errors import ModelError, in_one_line
from mmengine.models.quantising import CODINGS, Activations, Quantize
from mmengine.models.reader import WeightReader, open_reader
from mmengine_transformers.names import NAMES
from mmengine_transformers.packed import PackedLayer, kernels_for, packed_embedding
from mmengine_transformers.parts import parts_of


class StoredTensor:
    """A tensor in a file. Indexing reads the tensor, as transformers' loader expects."""

    def __init__(self, reader: WeightReader, name: str, lock: threading.Lock, is_scalar: bool) -> None:
        self._reader, self._name, self._lock, self._is_scalar = reader, name, lock, is_scalar

    def __getitem__(self, _: object) -> Tensor:
        with self._lock:  # The loader uses several threads, but the reader is not thread-safe.
            read = self._reader.read(self._name)
            return read[0] if self._is_scalar else read


@dataclass(frozen=True, slots=True)
class Target:
    """A stored tensor's target parameter. `is_converted`: whether a conversion changes more than the name."""

    name: str
    is_converted: bool


def build_empty(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    """Return a model on the meta device. Raises ModelError."""
    try:
        with torch.device("meta"), _default_dtype(dtype):
            return model_class(config).eval()
    except Exception as error:  # Model classes may raise any exception for inconsistent sizes.
        raise ModelError(
            f"{model_class.__name__} cannot be built from this config.json: {in_one_line(error)[:300]}"
        ) from error


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def load_weights(
    model: PreTrainedModel,
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    quantize: Quantize = "none",
    activations: Activations = "model",
) -> str:
    """Read all weights from `folder` into `model` (see `build_empty`).

    Returns a description of the quantised matrices' format in memory, or "".

    Raises ModelError for missing, wrong or superfluous tensors, and if `quantize` is set for quantised
    weights.
    """
    entries = NAMES.entries(folder)
    coding = CODINGS.get(quantize)
    if coding is not None and any(entry.coding is not None for entry in entries.values()):
        raise ModelError(f"the weights in {folder} are quantised already; remove quantize {quantize}")
    mapping = get_model_conversion_mapping(model)
    targets = _targets(model, entries, mapping)
    _check(model, folder, entries, targets)
    exact = _float32_names(model, dtype, targets)
    library = kernels_for(device, dtype)
    with (
        torch.inference_mode(),
        open_reader(entries, device, dtype, quantize=coding, activations=activations) as reader,
        open_reader(entries, device, torch.float32) as exact_reader,
    ):
        packed = _pack_linears(model, targets, exact, reader, library)
        lock = threading.Lock()
        rest = {
            stored: StoredTensor(
                exact_reader if targets[stored].name in exact else reader, stored, lock, not entry.shape
            )
            for stored, entry in entries.items()
            if stored not in packed and stored in targets
        }
        _load_rest(model, folder, rest, mapping, device, dtype)
        _pack_head(model, targets, reader, library)
        reader.check_activations()
        return reader.how_held()


def _targets(
    model: PreTrainedModel, entries: dict[str, TensorEntry], mapping: list[WeightRenaming | WeightConverter]
) -> dict[str, Target]:
    """Return a dict from stored names to targets, without tensors that the model lacks."""
    wanted = model.state_dict()
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    found = {}
    for stored in entries:
        name, pattern = rename_source_key(stored, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted and stored in wanted:
            name, pattern = stored, None
        if name in wanted:
            found[stored] = Target(name, pattern is not None)
    return found


def _check(
    model: PreTrainedModel, folder: Path, entries: dict[str, TensorEntry], targets: dict[str, Target]
) -> None:
    """Raise ModelError for a tensor that the model lacks, and for a wrong shape."""
    wanted = model.state_dict()
    ignored = [re.compile(each) for each in model._keys_to_ignore_on_load_unexpected or ()]
    ignored += [re.compile(r"rotary_emb\.inv_freq$"), re.compile(r"(^|\.)position_ids$")]
    for stored, entry in entries.items():
        if stored not in targets:
            if any(pattern.search(stored) for pattern in ignored):
                continue
            raise ModelError(
                f"{entry.path}: tensor {entry.stored_name} does not belong to the model that config.json "
                "describes"
            )
        target = targets[stored]
        if not target.is_converted and entry.shape != tuple(wanted[target.name].shape):
            raise ModelError(
                f"{entry.path}: tensor {entry.stored_name} has shape {list(entry.shape)}; config.json "
                f"requires {list(wanted[target.name].shape)}"
            )


def _float32_names(model: PreTrainedModel, dtype: torch.dtype, targets: dict[str, Target]) -> frozenset[str]:
    """Return the names of parameters that stay in float32 with any dtype."""
    patterns = [pattern.replace("*", ".*") for pattern in model._get_dtype_plan(dtype)]
    wanted, plan = model.state_dict(), re.compile("|".join(patterns) or "$^")
    names = {target.name for target in targets.values()}
    return frozenset(
        name for name in names if plan.search(name) or wanted[name].dtype == torch.float32 != dtype
    )


def _pack_linears(
    model: PreTrainedModel,
    targets: dict[str, Target],
    exact: frozenset[str],
    reader: WeightReader,
    library: ctypes.CDLL | None,
) -> set[str]:
    """Replace the decoder's linear layers by packed layers. Return the names of the tensors that were
    read.
    """
    if library is None:
        return set()
    parts, by_name = parts_of(model), {target.name: stored for stored, target in targets.items()}
    tied = set(model.all_tied_weights_keys) | set(model.all_tied_weights_keys.values())
    names = {id(module): name for name, module in model.named_modules()}
    read = set()
    for module in list(parts.decoder.modules()):
        if type(module) is not nn.Linear or module is parts.head:
            continue
        name = names[id(module)]
        stored = by_name.get(f"{name}.weight")
        if (
            stored is None
            or targets[stored].is_converted
            or {f"{name}.weight", f"{name}.bias"} & (exact | tied)
        ):
            continue
        bias = by_name.get(f"{name}.bias")
        if module.bias is not None and (bias is None or targets[bias].is_converted):
            continue
        layer = PackedLayer(library, reader, stored, bias)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer)
        read |= {stored} | ({bias} if bias else set())
    return read


def _load_rest(
    model: PreTrainedModel,
    folder: Path,
    rest: dict[str, StoredTensor],
    mapping: list[WeightRenaming | WeightConverter],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    settings = LoadStateDictConfig(
        device_map={"": device}, dtype=dtype, dtype_plan=model._get_dtype_plan(dtype), weight_mapping=mapping
    )
    try:
        info, _ = convert_and_load_state_dict_in_model(model, rest, settings)
    except ModelError:
        raise
    except Exception as error:  # Conversions may raise any exception for inconsistent tensors.
        raise ModelError(
            f"the weights in {folder} cannot be converted: {in_one_line(error)[:300]}"
        ) from error
    wrong = sorted(info.conversion_errors) + sorted(key for key, *_ in info.mismatched_keys)
    if wrong:
        raise ModelError(f"the weights in {folder} do not fit the model at {', '.join(wrong)[:300]}")
    ignored = [re.compile(each) for each in model._keys_to_ignore_on_load_missing or ()]
    for name in sorted(info.missing_keys - model.all_tied_weights_keys.keys()):
        if not any(pattern.search(name) for pattern in ignored):
            raise ModelError(f"the weights in {folder} have no tensor {name}; the download is incomplete")
    model.mark_tied_weights_as_initialized(info)
    model._move_missing_keys_from_meta_to_device(info.missing_keys, settings.device_map, None, None)
    model._initialize_missing_keys(False)
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model.requires_grad_(False)


def _pack_head(
    model: PreTrainedModel, targets: dict[str, Target], reader: WeightReader, library: ctypes.CDLL | None
) -> None:
    """Pack the LM head. A tied embedding becomes a PackedEmbedding if it only looks up and scales rows."""
    parts = parts_of(model)
    head, embedding = parts.head, parts.embedding
    if library is None or type(head) is not nn.Linear or head.weight.dtype != reader.dtype:
        return
    names = {id(module): name for name, module in model.named_modules()}
    by_name = {target.name: stored for stored, target in targets.items() if not target.is_converted}
    is_tied = head.weight is embedding.weight
    modules = (head, embedding) if is_tied else (head,)
    stored = next(filter(None, (by_name.get(f"{names[id(each)]}.weight") for each in modules)), None)
    if stored is None:
        return
    layer = PackedLayer(library, reader, stored, None, bias_values=head.bias, float32=True)
    parent, _, last = names[id(head)].rpartition(".")
    setattr(model.get_submodule(parent) if parent else model, last, layer)
    if is_tied and (packed := packed_embedding(embedding, layer)) is not None:
        reader.release(head.weight)
        model.set_input_embeddings(packed)
