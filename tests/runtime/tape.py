"""A fake for CUDA graphs that records torch operations, and replays them on the same memory.

As in a CUDA graph, Python code runs only during the recording.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
WAITS = (aten.item, aten._local_scalar_dense, aten.nonzero, aten.masked_select)


class _Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.done = []

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        if operation.overloadpacket in WAITS:
            raise RuntimeError("operation not permitted when stream is capturing")
        made = operation(*arguments, **(options or {}))
        self.done.append((operation, arguments, options or {}, made))
        return made


class TapeRecorder:
    def __init__(self):
        self.recorded = self.replayed = 0

    def record(self, compute):
        with _Tape() as tape:
            compute()
        self.recorded += 1

        def replay():
            self.replayed += 1
            for operation, arguments, options, made in tape.done:
                again = operation(*arguments, **options)
                for tensor, found in zip(tree_leaves(made), tree_leaves(again), strict=True):
                    if isinstance(tensor, torch.Tensor) and tensor.data_ptr() != found.data_ptr():
                        tensor.copy_(found)

        return replay
