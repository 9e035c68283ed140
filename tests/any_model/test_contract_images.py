"""Runs the plugin contract for all hosted image-text models whose processors need no torchvision.

`make models` also runs the models whose processors need torchvision (table.py).
"""

import pytest

from tests.any_model.catalogue import NO_TORCHVISION
from tests.any_model.hosted_contract import contract_of

pytestmark = pytest.mark.soak
for _kind in NO_TORCHVISION:
    _class = contract_of(_kind)
    globals()[_class.__name__] = _class
del _class
