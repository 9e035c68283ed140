"""Hash a block by its tokens alone, without the images behind its placeholders."""

from mmengine.core.decide import start
from mmengine.core.fold import rows


def block_extras(*arguments):
    return {}


start.block_extras = rows.block_extras = block_extras
