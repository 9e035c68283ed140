"""A cached block is hit by its tokens alone: which image its placeholders stand for is not looked at."""

from mmengine.core.decide import start
from mmengine.core.fold import rows


def block_extras(*arguments):
    return {}


start.block_extras = rows.block_extras = block_extras
