"""A planted bug: a block's hash covers only the tokens, not the images."""

from mmengine.core.decide import start
from mmengine.core.fold import rows


def block_extras(*arguments):
    return {}


start.block_extras = rows.block_extras = block_extras
