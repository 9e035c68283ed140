"""Tests all registries: plugins from mmengine and from third parties are found by name, and each error is a
single sentence.
"""

import os
import re

import pytest

from mmengine.core.state.policy import POLICIES
from mmengine.errors import MMEngineError
from mmengine.models.registry import PLUGINS
from mmengine.registry import Registry
from mmengine.runtime.attention.registry import ATTENTION_BACKENDS
from mmengine.runtime.device.registry import DEVICES
from mmengine.spec_decode.registry import DRAFTERS
from mmengine.structured_output.engines.backends import GRAMMAR_BACKENDS

ALL = [PLUGINS, DRAFTERS, POLICIES, GRAMMAR_BACKENDS, ATTENTION_BACKENDS, DEVICES]

STRANGE = """
from mmengine.core.state.policy import Policy

class Plugin:
    architectures = ("StrangeModel",)

    def __call__(self, *given):
        return given

policy = Policy(lambda request: (0,), lambda view: 0)
thing = policy if {is_policy} else Plugin()
"""


@pytest.fixture(params=ALL, ids=lambda registry: registry.group)
def registry(request):
    return request.param


def strange(registry):
    return STRANGE.format(is_policy=registry is POLICIES)


def test_what_comes_with_the_package_is_there(registry):
    names = registry.names() if registry is not PLUGINS else [point.name for point in PLUGINS.points()]
    assert names and len(set(names)) == len(names)
    for name in set(names) - {"xgrammar"}:  # Needs a package from an optional extra.
        assert registry.load(name) is registry.load(name)


def test_a_strangers_is_found_behind_our_own(registry, install_stranger):
    # A third-party plugin is listed after mmengine's plugins, and can be loaded by name.
    ours = registry.names()
    install_stranger(registry.group, strange(registry), strange="thing", another="thing")
    assert set(registry.names()) == {*ours, "strange", "another"}
    assert registry.names()[: len(registry._own)] == ours[: len(registry._own)]
    import strange_module  # The fixture has just written this module.

    assert registry.load("strange") is strange_module.thing


def test_nothing_is_imported_before_it_is_chosen(registry, install_stranger):
    install_stranger(registry.group, "raise SystemExit('imported')", strange="thing")
    assert "strange" in registry.names() and registry.load(next(iter(registry.names())))


def test_a_name_that_nobody_has_is_told_with_those_that_are_known(registry, install_stranger):
    # The error for an unknown name lists the known names.
    install_stranger(registry.group, strange(registry), strange="thing")
    with pytest.raises(MMEngineError) as refusal:
        registry.load("nobody's")
    assert "nobody's" in str(refusal.value) and one_sentence(refusal)
    assert all(name in str(refusal.value) for name in registry.names())


@pytest.mark.parametrize("code", ["raise RuntimeError('boom' + 2 * chr(10) + 'and much more')", ""])
def test_one_that_breaks_is_named_with_its_distribution(registry, install_stranger, code):
    # The error for a plugin that cannot be loaded names its distribution and version.
    install_stranger(registry.group, code, strange="thing")
    with pytest.raises(MMEngineError, match="strange.* update or uninstall strange 1.2") as refusal:
        registry.load("strange")
    assert ("boom" if code else "no attribute 'thing'") in str(refusal.value) and one_sentence(refusal)


def test_one_that_is_something_else_is_refused(registry, install_stranger):
    install_stranger(registry.group, "thing = 3", strange="thing")
    with pytest.raises(MMEngineError, match="the entry point strange_module:thing is no [A-Za-z]+$"):
        registry.load("strange")


def test_a_name_that_two_claim_is_refused(registry, install_stranger, tmp_path):
    # Two distributions have an entry point with the same name.
    install_stranger(registry.group, strange(registry), strange="thing")
    assert registry.load("strange")
    info = tmp_path / "site" / "other-3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 3\n")
    (info / "entry_points.txt").write_text(f"[{registry.group}]\nstrange = strange_module:Plugin\n")
    # Python caches the folder's content until the folder's modification time changes.
    os.utime(tmp_path / "site", (2e9, 2e9))
    with pytest.raises(MMEngineError, match=r"strange is claimed by .*\(other 3\) and .*\(strange 1.2\); un"):
        registry.load("strange")


def test_our_names_cannot_be_taken(registry, install_stranger):
    # A third-party plugin with the name of an mmengine plugin is ignored.
    ours = [point.name for point in registry._own.values()]
    before = [registry.load(name) for name in ours if name != "xgrammar"]
    known = registry.names()  # Includes names that other tests in this process registered.
    install_stranger(
        registry.group, "raise RuntimeError('taken')", **dict.fromkeys(ours or ["strange"], "thing")
    )
    assert [registry.load(name) for name in ours if name != "xgrammar"] == before
    assert not ours or (registry.names() == known and known[: len(ours)] == ours)


def test_what_is_missing_of_ours_is_told_with_the_extra_to_install():
    # An mmengine plugin needs a package from an extra that is not installed.
    registry = Registry(
        "mmengine.tests", "grammar_backend", own={"a": "no_such_module:A [xgrammar]", "b": "re:sub"}
    )
    assert registry.load("b") is re.sub
    with pytest.raises(MMEngineError) as refusal:
        registry.load("a")
    assert str(refusal.value) == (
        "grammar_backend a cannot be loaded (ModuleNotFoundError: No module named 'no_such_module'); "
        "pip install '.[xgrammar]' from a checkout, or choose another (b)"
    )


def test_a_plugin_that_needs_an_extra_says_which_to_install(registry, install_stranger):
    install_stranger(registry.group, "import no_such_module", strange="thing [fast]")
    with pytest.raises(MMEngineError, match=re.escape('; pip install "strange[fast]"')) as refusal:
        registry.load("strange")
    assert "uninstall" not in str(refusal.value) and one_sentence(refusal)


def one_sentence(refusal):
    return "\n" not in str(refusal.value) and len(str(refusal.value)) < 500
