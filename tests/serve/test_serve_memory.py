"""If the kernels run out of memory, only the current step fails, and other requests are answered."""

import pytest

from mmengine.errors import RequestFailed
from mmengine.native import decoder, library
from mmengine.serve.engine.engine import Engine

pytestmark = pytest.mark.skipif(library.load() is None, reason="the native CPU kernels are not available")


class Short:
    """Kernels that run out of memory `fails` times."""

    fails = 0

    def __init__(self, real):
        self._real = real

    def __getattr__(self, name):
        return getattr(self._real, name)

    def mm_decoder_forward(self, *arguments):
        if Short.fails:
            Short.fails -= 1
            return 1
        return self._real.mm_decoder_forward(*arguments)


def test_a_step_without_memory_fails_alone(monkeypatch):
    declared = decoder.declare_functions
    monkeypatch.setattr(decoder, "declare_functions", lambda real: Short(declared(real)))
    with Engine(dtype="bfloat16") as engine:
        expected = engine.generate(["What is a triangle?"], max_tokens=20)[0].token_ids
        Short.fails = 1  # at most max_retries, so the request survives
        assert engine.generate(["What is a triangle?"], max_tokens=20)[0].token_ids == expected
        Short.fails = 2
        with pytest.raises(
            RequestFailed, match="MemoryError: not enough memory for the linear layers or the attention"
        ):
            engine.generate(["What is a square?"], max_tokens=20)
        assert Short.fails == 0
        assert engine.generate(["What is a triangle?"], max_tokens=20)[0].token_ids == expected
        assert engine.readiness()
