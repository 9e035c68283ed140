"""Tests that a third-party grammar engine can be selected and produces answers."""

import json

import pytest

from mmengine.config import EngineConfig
from mmengine.errors import ConfigError
from mmengine.serve.engine.engine import Engine

SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [3, 4]}},
    "required": ["n"],
    "additionalProperties": False,
}
THEIRS = """
from mmengine.structured_output.engines.llguidance.backend import LLGuidance

compiled = []

class Theirs(LLGuidance):
    def compile(self, grammar):
        compiled.append(grammar)
        return super().compile(grammar)
"""


def test_a_third_party_grammar_backend_is_used(install_stranger):
    install_stranger("mmengine.grammar_backends", THEIRS, theirs="Theirs")
    with Engine(config=EngineConfig(grammar_backend="theirs", spec="none")) as engine:
        form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
        (answer,) = engine.generate(["How many?"], response_format=form, max_tokens=24)
    import strange_module  # install_stranger has made this module importable.

    assert json.loads(answer.text)["n"] in (3, 4)
    assert len(strange_module.compiled) == 1 and '"n"' in strange_module.compiled[0].source


def test_a_broken_backend_is_refused_before_loading_the_model(install_stranger):
    install_stranger("mmengine.grammar_backends", "import no_such_module", theirs="Theirs")
    with pytest.raises(ConfigError) as refusal:
        Engine("no such model", config=EngineConfig(grammar_backend="theirs"))
    assert str(refusal.value) == (
        "grammar_backend theirs cannot be loaded (ModuleNotFoundError: No module named 'no_such_module'); "
        "update or uninstall strange 1.2, or choose another (llguidance, xgrammar)"
    )
