"""Builds an engine for the included checkpoint with slow steps, so that most streams are unfinished at any
instant.
"""

import time

from mmengine.build import build as real_build

STEP_S = 0.05


def build(*given, **options):
    built = real_build(*given, **options)
    collect = built.executor.collect

    def paced():
        time.sleep(STEP_S)
        return collect()

    built.executor.collect = paced
    return built
