"""Tests benchmarks/cpu/lora.py: its adapters and its simulation. Times are not checked."""

import pytest
from safetensors.torch import load_file

TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def test_its_adapters_have_the_size_that_it_tells(module, tmp_path):
    """`num_bytes` returns the size of the tensors that `write_adapter` writes."""
    writes = module("cpu.lora_adapters")
    folder = writes.write_adapter(tmp_path / "one", TEXT, 4, seed=0)
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * 2 and {min(each.shape) for each in tensors.values()} == {4}
    assert sum(each.nbytes for each in tensors.values()) == writes.num_bytes(TEXT, 4)


@pytest.mark.soak
def test_waits_by_both_rules_are_in_the_table(module):
    """For each gap between requests, the table has a row for mmengine's rules and a row for vLLM's rules."""
    lora = module("cpu.lora")
    found = lora.waits(60)
    (table,) = found.tables
    assert len(table.rows) == 2 * len(lora.GAPS_MS) and len(found.targets) == 1
