"""Old names of modules lead to where they are now."""

import sys
from importlib import import_module

import pytest

from mmengine.moved import MOVED, MovedFinder


@pytest.fixture(autouse=True)
def forgotten():
    """As before anybody asked."""
    for name in MOVED:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_old_names_are_found_with_a_warning(old, new):
    with pytest.warns(DeprecationWarning, match=f"{old} is {new} now"):
        module = import_module(old)
    found = import_module(new)
    names = [name for name in vars(found) if not name.startswith("_")]
    assert names and all(getattr(module, name) is getattr(found, name) for name in names)
    assert found.__name__ == new and found.__spec__.name == new


def test_what_documents_told_of_can_be_imported():
    with pytest.warns(DeprecationWarning):
        from mmengine.core.past import Resume
        from mmengine.core.policy import Policy, register_policy
    from mmengine.core.resume import Resume as resume
    from mmengine.core.state import policy

    assert Resume is resume and Policy is policy.Policy and register_policy is policy.register_policy


def test_a_name_that_is_not_there_is_an_import_error():
    with pytest.raises(ImportError), pytest.warns(DeprecationWarning):
        from mmengine.core.policy import gone  # noqa: F401
    assert MovedFinder().find_spec("mmengine.core.gone") is None
    with pytest.raises(ModuleNotFoundError):
        import_module("mmengine.core.gone")
