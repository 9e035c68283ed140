"""Divides a model's attention layers into block groups (mmengine/block_groups.py), and describes each group
with a ModelSpec.

Every block has space for the KV of n layers, where n is the first group's number of layers. All blocks are
equally large, so all groups share a single pool.
"""

from collections.abc import Sequence
from dataclasses import replace

from mmengine.block_groups import MAX_GROUPS, BlockGroup
from mmengine.models.spec import LayerAttention, ModelSpec

PADDING_SHARE = 0.25  # Maximum number of empty layer slots in all groups, per layer with KV.


def block_groups(spec: ModelSpec, max_model_len: int) -> tuple[BlockGroup, ...]:
    """Return the model's groups, or () if separate groups would not save memory.

    `max_model_len`: a window of at least this size counts as no window. Layers that share KV belong to the
    same group as the layer that stores the KV.
    """
    if spec.state is not None or spec.problem() is not None:
        return ()
    kinds: dict[int, list[int]] = {}
    for owner in sorted({layer.kv_layer for layer in spec.attention}):
        kinds.setdefault(_window_of(spec.attention, owner, max_model_len), []).append(owner)
    full = kinds.pop(0, [])
    if not kinds:
        return ()
    if not full:
        # A block's content id depends on the previous block, so a window must reach into the previous block.
        # A window of 1 does not, and the model gets no groups.
        longest, layers = max(kinds), sum(kinds.values(), [])
        return (BlockGroup(longest, tuple(sorted(layers))),) if longest > 1 else ()
    size = len(full)
    groups = [BlockGroup(0, tuple(full))]
    for window, layers in sorted(kinds.items()):
        parts = (tuple(layers[start : start + size]) for start in range(0, len(layers), size))
        groups += [BlockGroup(window, part) for part in parts]
    if len(groups) > MAX_GROUPS or len(groups) * size > (1 + PADDING_SHARE) * spec.num_kv_layers:
        return ()
    return tuple(groups)


def _window_of(layers: Sequence[LayerAttention], owner: int, max_model_len: int) -> int:
    """Return the largest window or chunk of the layers that read KV from layer `owner`; 0 if a layer sees all
    keys.
    """
    limits = [
        min((limit for limit in (layer.window, layer.chunk) if limit), default=0)
        for layer in layers
        if layer.kv_layer == owner
    ]
    return 0 if 0 in limits or max(limits) >= max_model_len else max(limits)


def groups_unfit(spec: ModelSpec, groups: Sequence[BlockGroup]) -> str | None:
    """Return why `groups` do not describe this model, or None if they do."""
    stored = sorted(layer for group in groups for layer in group.layers)
    owners = sorted({layer.kv_layer for layer in spec.attention})
    if stored != owners:
        return f"they store the KV of the layers {stored[:20]}, and the model has KV in {owners[:20]}"
    for group in groups:
        for owner in group.layers:
            window = _window_of(spec.attention, owner, 2**31)
            if group.window and not 0 < window <= group.window:
                return f"layer {owner} needs more keys than the last {group.window}"
    return None


def block_spec(spec: ModelSpec, groups: Sequence[BlockGroup]) -> ModelSpec:
    """Return a spec with the model's sizes and as many layers as a block holds."""
    if not groups:
        return spec
    return replace(spec, num_layers=max(len(group.layers) for group in groups), state=None, attention=())


def group_spec(spec: ModelSpec, group: BlockGroup) -> tuple[ModelSpec, list[int]]:
    """Return the group's layers as a model, and the layers' numbers in `spec`. A layer that reads another
    layer's KV belongs to that layer's group.
    """
    members = [number for number, layer in enumerate(spec.attention) if layer.kv_layer in group.layers]
    places = {number: place for place, number in enumerate(members)}
    layers = [spec.attention[number] for number in members]
    layers = [replace(layer, kv_layer=places[layer.kv_layer]) for layer in layers]
    is_plain = all(layer.is_plain(spec.head_dim) for layer in layers) and len(members) == len(group.layers)
    attention = () if is_plain else tuple(layers)
    return replace(spec, num_layers=len(members), state=None, attention=attention), members
