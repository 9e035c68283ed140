"""Linear layers and embeddings whose matrix is packed for the CPU kernels."""

import ctypes

import torch
from torch import Tensor, nn

from mmengine.models.reader import WeightReader
from mmengine.native import library as native
from mmengine.native.dtypes import DTYPES
from mmengine.native.linear import PackedLinear

_NUM_COMPARED = 64  # Number of rows that `packed_embedding` compares.
_CLOSE = 0.02


def kernels_for(device: torch.device, dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the kernels if they can multiply matrices of this dtype on this device, else None."""
    return native.load() if device.type == "cpu" and dtype in DTYPES else None


class PackedLayer(nn.Module):
    """Replaces nn.Linear: y = x w^T + bias for x [..., k]. With `float32`, the result is float32."""

    def __init__(
        self,
        library: ctypes.CDLL,
        reader: WeightReader,
        weight: str,
        bias: str | None,
        *,
        bias_values: Tensor | None = None,
        float32: bool = False,
    ) -> None:
        """Read and pack the tensors `weight` and `bias`. `bias_values`: a bias that was already read."""
        super().__init__()
        self.bias = reader.read(bias) if bias is not None else bias_values
        self.packed = PackedLinear(library, reader.held(weight), self.bias)
        self.in_features, self.out_features = self.packed.c.k, self.packed.c.n
        self._float32 = float32

    @property
    def weight(self) -> Tensor:
        """Return a meta tensor with the matrix's shape and dtype."""
        return torch.empty(self.out_features, self.in_features, dtype=self.packed.dtype, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        packed, shape = self.packed, x.shape
        rows = x.reshape(-1, shape[-1])
        if rows.dtype != packed.dtype or (rows.shape[0] and rows.stride(1) != 1):
            rows = rows.to(packed.dtype).contiguous()
        return packed(rows, float32=self._float32).view(*shape[:-1], self.out_features)

    __call__ = forward  # Skips nn.Module's call, which takes as long as a small matmul.


class PackedEmbedding(nn.Module):
    """Replaces an nn.Embedding that is tied to the head. Unpacks rows from the head's packed matrix. `scale`:
    a factor for the rows, or None.
    """

    def __init__(self, head: PackedLayer, scale: Tensor | None = None) -> None:
        super().__init__()
        self._scale = None if scale is None else scale.to(head.packed.dtype)
        self._rows = head.packed.rows
        self.num_embeddings, self.embedding_dim = head.out_features, head.in_features
        self._head = [head]  # In a list, so that torch does not register the head a second time.

    @property
    def weight(self) -> Tensor:
        return self._head[0].weight

    def forward(self, input_ids: Tensor) -> Tensor:
        found = self._rows(input_ids.reshape(-1)).view(*input_ids.shape, self.embedding_dim)
        return found if self._scale is None else found * self._scale


def packed_embedding(embedding: nn.Module, head: PackedLayer) -> PackedEmbedding | None:
    """Return the replacement for an embedding that is tied to the head. Return None if the embedding does
    more than look up rows and multiply them by `embed_scale`.
    """
    if type(embedding) is nn.Embedding:
        return PackedEmbedding(head)
    scale = getattr(embedding, "embed_scale", None)
    if not isinstance(embedding, nn.Embedding) or scale is None:
        return None
    made = PackedEmbedding(head, torch.as_tensor(scale))
    # The class is unknown, so some rows are compared. They may differ by rounding if the head is quantised.
    step = max(1, head.out_features // _NUM_COMPARED)
    ids = torch.arange(0, head.out_features, step, device=embedding.weight.device)
    mine, theirs = made(ids).float(), embedding(ids).float()
    return (
        made if torch.allclose(mine, theirs, rtol=_CLOSE, atol=_CLOSE * float(theirs.abs().max())) else None
    )
