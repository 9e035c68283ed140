"""Hash a block by its tokens only, without the hashes of its images."""

from mmengine.core.decide import start
from mmengine.core.fold import rows


def block_extras(*arguments):
    return {}


start.block_extras = rows.block_extras = block_extras
