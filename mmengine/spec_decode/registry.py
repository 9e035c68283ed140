"""Look up drafters that need only texts, by name; third-party drafters come from entry points.

An entry point in the group `mmengine.drafters` names a callable that takes the row count and returns a
Drafter.
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
    beside=("none", "auto", "grammar", "eagle3"),
    unknown="spec {name!r} is no drafter; known are {known}",
    broken="spec {name!r} cannot be loaded from its entry point: {error}; {advice}",
)
