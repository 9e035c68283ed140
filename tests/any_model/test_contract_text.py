"""Runs the plugin contract for text architectures that transformers' modules compute.

Four kinds of attention run with `make test`, in the settings that differ most; all architectures run whole
with `make soak`.
"""

from typing import ClassVar

import pytest

from mmengine.testing.contract import PluginContract
from mmengine_transformers import plugin
from tests.any_model.catalogue import write

SHORT = {  # Kind of attention by architecture.
    "gemma2": "windows and soft caps",
    "gpt_oss": "sinks",
    "gemma4_text": "shared KV",
    "deepseek_v3": "MLA",
}
WHOLE = (
    *SHORT,
    *("cohere2", "gemma3_text", "gemma3n_text", "glm4", "granite", "mixtral", "olmo2", "phi3"),
)


class HostedContract(PluginContract):
    """The contract for `kind`, a factory's name. The processor's start imports torch with transformers."""

    plugin = plugin
    refused: ClassVar[dict[str, object]] = {}
    kind: str
    test_the_processor_starts_without_torch = None

    def make_checkpoint(self, folder):
        return write(self.kind, folder)


class ShortContract(HostedContract):
    """Fewer settings, each of which differs much from the others."""

    test_bfloat16_chooses_what_is_likeliest_but_for_near_ties = None
    test_the_fingerprint_is_of_the_weights = None
    test_what_a_config_cannot_be_is_refused_by_name = None
    test_no_text_poses_as_structure = None

    @pytest.mark.parametrize("name", ["in chunks"])
    def test_log_probabilities_are_transformers(self, made, name):
        super().test_log_probabilities_are_transformers(made, name)

    @pytest.mark.parametrize("name", ["preempted", "drafted"])
    def test_tokens_are_transformers(self, made, tmp_path, name):
        super().test_tokens_are_transformers(made, tmp_path, name)

    @pytest.mark.parametrize("what", ["missing"])
    def test_a_wrong_tensor_is_refused_by_name(self, made, copy, what):
        super().test_a_wrong_tensor_is_refused_by_name(made, copy, what)


def _classes(base, kinds, suffix, marks=()):
    for kind in kinds:
        name = f"Test{kind.title().replace('_', '')}{suffix}"
        yield name, type(name, (base,), {"kind": kind, "pytestmark": list(marks), "__module__": __name__})


globals().update(_classes(ShortContract, SHORT, "Short"))
globals().update(_classes(HostedContract, WHOLE, "", [pytest.mark.soak]))
del HostedContract, ShortContract
