"""Describes a model's sizes and attention layers to the runtime and the scheduler."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from mmengine.models.states import StateSpec

RunKind: TypeAlias = Literal["", "run", "media", "prompt"]


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Describes which keys an attention layer's queries attend to. Below, key and query are token indices in
    a row.

    `kv_layer`: the attention layer whose KV this layer reads. A layer that reads an earlier layer's KV stores
    no KV. `window`: a query attends only to keys > query - window; 0: no window. `chunk`: a query attends
    only to keys with key // chunk == query // chunk; 0: no chunks. `softcap`: a score becomes softcap *
    tanh(score / softcap); 0: unchanged. `scale`: multiplies scores; 0: head_dim ** -0.5. `has_sinks`: each
    head has a learned score that takes part in the softmax but has no value. `sees_runs`: tokens also attend
    to later tokens in the same run (ModelSpec.runs), within the window. `value_dim`: the size of a value
    head, which the KV pool pads with zeros to head_dim; 0: head_dim.
    """

    kv_layer: int
    window: int = 0
    softcap: float = 0.0
    scale: float = 0.0
    chunk: int = 0
    has_sinks: bool = False
    sees_runs: bool = False
    value_dim: int = 0

    def is_plain(self, head_dim: int) -> bool:
        """Return whether the layer is causal attention over all keys with the default scale."""
        scale = self.scale in (0, head_dim**-0.5)
        return scale and not (self.window or self.softcap or self.chunk or self.has_sinks or self.sees_runs)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The model sizes that the runtime and the scheduler need.

    `runs`: which tokens form a run in layers with `sees_runs`. "run": a media item's consecutive placeholder
    tokens. "media": all media tokens in a prompt. "prompt": all tokens in a prompt.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    num_deepstack: int  # The encoder returns (1 + num_deepstack) * hidden_size features for a media token.
    patch_width: int  # How many values a patch has; 0 for a model without an encoder.
    merge_size: int = 2  # An embedding is made from merge_size x merge_size patches.
    weights_held: str = ""  # How quantised matrices are held in memory, as a text for users, or "".
    state: StateSpec | None = None  # The layers with recurrent states in place of KV, if any.
    # One entry for each attention layer, in order. Without entries, all layers are plain and have their own
    # KV.
    attention: tuple[LayerAttention, ...] = ()
    runs: RunKind = ""
    atomic_runs: bool = False  # Whether one step must compute all tokens of a run of media tokens.
    whole_prompt: bool = False  # Whether one step must compute a request's whole prompt.

    @property
    def num_attention_layers(self) -> int:
        """Return how many layers have attention. An AttentionPort numbers only these layers."""
        return self.num_layers - (self.state.num_layers if self.state is not None else 0)

    @property
    def num_kv_layers(self) -> int:
        """Return how many layers store KV."""
        return len({layer.kv_layer for layer in self.attention}) or self.num_attention_layers

    @property
    def kv_places(self) -> tuple[int, ...]:
        """Return the layer in the KV pool that each attention layer reads."""
        owners = sorted({layer.kv_layer for layer in self.attention})
        layers = (owners.index(layer.kv_layer) for layer in self.attention)
        return tuple(layers) or tuple(range(self.num_attention_layers))

    @property
    def shares_kv(self) -> bool:
        """Return whether any layer reads another layer's KV."""
        return any(layer.kv_layer != number for number, layer in enumerate(self.attention))

    @property
    def has_encoder(self) -> bool:
        return self.patch_width > 0

    def problem(self) -> str | None:
        """Return why the attention layers contradict each other, or None if they do not."""
        layers = self.attention
        if layers and len(layers) != self.num_attention_layers:
            return f"{len(layers)} attention layers are described; the model has {self.num_attention_layers}"
        for number, layer in enumerate(layers):
            if not 0 <= layer.kv_layer <= number or layers[layer.kv_layer].kv_layer != layer.kv_layer:
                return f"attention layer {number} reads the KV of layer {layer.kv_layer}, which stores none"
        needed = {"run": self.atomic_runs, "media": self.whole_prompt, "prompt": self.whole_prompt}
        if any(layer.sees_runs for layer in layers) and not needed.get(self.runs, False):
            return f"tokens of a {self.runs or 'run'} see one another, but a step may compute a part of them"
        return None
