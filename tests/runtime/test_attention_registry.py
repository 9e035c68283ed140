"""Tests that a third-party attention backend can be chosen by name, and that a broken backend is refused."""

import pytest

from mmengine.config import EngineConfig
from mmengine.errors import ConfigError
from mmengine.serve.engine.engine import Engine

THEIRS = """
from mmengine.runtime.attention.torch_paged import TorchPagedAttention

steps = []

class Theirs(TorchPagedAttention):
    def begin(self, meta, bucket=None):
        steps.append(len(meta.slots))
        super().begin(meta, bucket)
"""


def answer(attention):
    with Engine(config=EngineConfig(spec="none"), device="cpu", attention=attention) as engine:
        (found,) = engine.generate(["What is 3 plus 4?"], max_tokens=8, temperature=0.0)
    return found


def test_a_third_party_attention_backend_is_used(install_stranger):
    install_stranger("mmengine.attention_backends", THEIRS, theirs="Theirs")
    found = answer("theirs")
    import strange_module  # created by install_stranger

    assert len(strange_module.steps) >= len(found.token_ids) > 0
    assert found.token_ids == answer("torch").token_ids


def test_a_broken_backend_is_refused_in_one_sentence(install_stranger):
    install_stranger("mmengine.attention_backends", "import no_such_module", theirs="Theirs")
    with pytest.raises(ConfigError) as refusal:
        answer("theirs")
    assert str(refusal.value) == (
        "attention backend theirs cannot be loaded (ModuleNotFoundError: No module named 'no_such_module'); "
        "update or uninstall strange 1.2, or choose another (flashinfer, native, torch, triton)"
    )
