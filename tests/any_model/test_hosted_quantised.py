"""Tests transformers' models in our engine, with FP8 or int4 weights, or with int8 quantising at loading.

The reference is transformers' model with the dequantised weights.
"""

from tests.any_model.hosted_contract import HostedContract
from tests.models.test_contract_schemes import Fp8, Int4, Int8


class OneSetting:
    """Runs the token test with chunked prompts only. The model is gemma2, and test_contract_whole.py has its
    other checks.
    """

    kind = "gemma2"
    test_log_probabilities_are_transformers = None
    test_a_killed_process_continues_with_the_same_tokens = None
    test_images_come_in_any_order = test_an_item_above_the_token_budget_is_refused = None

    def test_tokens_are_transformers(self, made, tmp_path):
        super().test_tokens_are_transformers(made, tmp_path, "in chunks")


class TestFp8(OneSetting, Fp8, HostedContract):
    pass


class TestInt4(OneSetting, Int4, HostedContract):
    pass


class TestInt8(OneSetting, Int8, HostedContract):
    test_tokens_are_transformers = None  # Int8 quantising needs bfloat16, but this test uses float32.


del HostedContract
