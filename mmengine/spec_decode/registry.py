"""The registry of the drafters that need only the rows' tokens. Packages can register more drafters.

A package registers an entry point in the group `mmengine.drafters`. The entry point names a callable that
takes the maximum number of rows and returns a Drafter.
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
