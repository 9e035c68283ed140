"""Runs a part of the plugin contract for six hosted architectures (served with transformers' modules). Each
architecture has a different kind of attention, and none needs torchvision. `make soak` runs the whole
contract for all architectures (test_contract_whole.py).
"""

import pytest

from tests.any_model.hosted_contract import HostedContract, contract_of

SHORT = {  # Kind of attention by architecture.
    "gemma2": "windows and soft caps",
    "gpt_oss": "sinks",
    "gemma4_text": "shared KV",
    "deepseek_v3": "MLA",
    "gemma3": "images whose tokens see one another",
    "paddleocr_vl": "M-RoPE",
}


class ShortContract(HostedContract):
    """The plugin contract with fewer tests and settings."""

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


for _kind in SHORT:
    _class = contract_of(_kind, ShortContract)
    globals()[_class.__name__] = _class
del _class, HostedContract, ShortContract
