"""The registry of block stores. The setting `block_store` is a name in this registry."""

from collections.abc import Callable
from typing import TypeAlias

from mmengine.block_store.base import BlockStore
from mmengine.registry import Registry

MakeBlockStore: TypeAlias = Callable[[str, int], BlockStore]
BLOCK_STORES: Registry[MakeBlockStore] = Registry(
    "mmengine.block_stores",
    "block store",
    own={"folder": "mmengine.block_store.folder:FolderStore"},
)
