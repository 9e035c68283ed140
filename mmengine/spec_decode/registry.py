"""The registry of drafters that read only the rows' tokens, such as n-gram drafters.

A package adds a drafter with an entry point in the group `mmengine.drafters`. The entry point is a callable
that takes the maximum number of rows and returns a Drafter.
"""

from collections.abc import Callable

from mmengine.registry import Registry
from mmengine.spec_decode.base import Drafter

DRAFTERS: Registry[Callable[[int], Drafter]] = Registry(
    "mmengine.drafters",
    "drafter",
    own={
        "ngram": "mmengine.spec_decode.ngram:NgramDrafter",
        "suffix": "mmengine.spec_decode.suffix:SuffixDrafter",
    },
    beside=("none", "auto", "grammar", "eagle3", "mtp"),
    unknown="spec {name!r} is no drafter; known are {known}",
    broken="spec {name!r} cannot be loaded from its entry point: {error}; {advice}",
)
