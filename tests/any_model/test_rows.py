"""Tests the model table's rows for architectures without a checkpoint."""

import pytest

from tests.any_model.rows import NO_PROCESSOR, REFUSED, UNKNOWN, WORKS, run_class


@pytest.mark.parametrize(
    ("name", "kind", "verdict", "reason"),
    [
        ("OPTForCausalLM", "opt", WORKS, ""),
        ("ModernBertDecoderForCausalLM", "modernbert-decoder", WORKS, ""),
        ("MoshiForCausalLM", "moshi", REFUSED, "transformers' cache keeps 12 tokens in layer 0"),
        ("AriaForConditionalGeneration", "aria", UNKNOWN, NO_PROCESSOR),
        ("Lfm2ForCausalLM", "lfm2", REFUSED, "layers conv bypass"),
        ("Lfm2VlForConditionalGeneration", "lfm2_vl", REFUSED, "layers conv bypass"),
        ("FastVlmForConditionalGeneration", "fast_vlm", REFUSED, "a model of timm"),
        ("MambaForCausalLM", "mamba", REFUSED, "recurrent layers"),
        ("NewForCausalLM", "new", REFUSED, "no such class"),
    ],
)
def test_a_class_gets_its_verdict_from_its_default_config(name, kind, verdict, reason):
    row = run_class(name, kind)
    assert row.verdict == verdict and reason in row.reason, row
