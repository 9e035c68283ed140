"""Finds the auxiliary layers: the target model's layers whose inputs an EAGLE-3 draft head reads. Published
files number auxiliary layers in two ways. In this package, auxiliary layer i means L_in(i), the residual
stream before the target's layer i (0-based). For a target with n layers, L_in(n) is the residual stream
before the final norm. The first matching rule below finds the layers:

* an id i at the top level of config.json (vLLM, speculators) means L_in(i);
* an id i in `eagle_config` means L_in(i + 1) if the first id is 1 (ModelOpt, AngelSlim and SGLang: "the
  output of layer i"), else L_in(i);
* without ids, a head that reads three states uses EAGLE's default for a target with n layers: L_in(2),
  L_in(n // 2), L_in(n - 3).
"""

from collections.abc import Sequence
from itertools import pairwise

from mmengine.errors import shown
from mmengine.spec_decode.eagle3.families import Family

FIELD = "eagle_aux_hidden_state_layer_ids"
MAX_AUX_LAYERS = 16
_COUNTS = ("num_aux_hidden_states", "num_aux_layers")


def aux_layers(
    family: Family, num_aux_layers: int, num_layers: int, chosen: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the auxiliary layers in ascending order.

    The head's fc layer reads `num_aux_layers` hidden states, and the target has `num_layers` layers.

    `chosen` replaces the ids in the file. Raises a ModelError that names the inconsistent field.
    """
    if not 1 <= num_aux_layers <= MAX_AUX_LAYERS:
        family.root.fail(
            f"fc.weight reads {num_aux_layers} hidden states of the target; 1 to {MAX_AUX_LAYERS} are taken"
        )
    for name in _COUNTS:
        if family.value(name) not in (None, num_aux_layers):
            family.root.fail(f"{name} is {shown(family.value(name))}, but fc.weight reads {num_aux_layers}")
    layers, source = _ids(family, num_aux_layers, num_layers, chosen)
    if len(layers) != num_aux_layers:
        family.root.fail(f"{source} names {len(layers)} layers, but fc.weight reads {num_aux_layers}")
    if not all(0 <= layer <= num_layers for layer in layers):
        family.root.fail(
            f"{source} gives the inputs of layers {list(layers)}; the target has layers 0 to "
            f"{num_layers - 1}, and {num_layers} is the input of its final norm: "
            "does the head belong to another model?"
        )
    if not all(low < high for low, high in pairwise(layers)):
        family.root.fail(
            f"{source} gives the inputs of layers {list(layers)}, which do not ascend; a target of "
            f"{num_layers} layers needs its own {FIELD}"
        )
    return layers


def _ids(
    family: Family, num_aux_layers: int, num_layers: int, chosen: Sequence[int] | None
) -> tuple[tuple[int, ...], str]:
    """Return the auxiliary layers, and the name of the field from which they come."""
    if chosen is not None:
        return tuple(chosen), "tap_layers"
    for fields in (family.root, family.nested):
        if fields.values.get(FIELD):  # null and [] count as missing
            ids = fields.integers(FIELD, None, 0, 2**16, MAX_AUX_LAYERS)
            shift = 1 if fields is family.nested and ids[0] == 1 else 0
            return tuple(i + shift for i in ids), f"{fields.prefix}{FIELD}"
    if num_aux_layers != 3:
        family.root.fail(f"{FIELD} is missing, and fc.weight reads {num_aux_layers} hidden states, not 3")
    return (2, num_layers // 2, num_layers - 3), f"without {FIELD}, EAGLE's default"
