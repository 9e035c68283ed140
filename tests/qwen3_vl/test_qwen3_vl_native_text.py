"""Tests the CPU kernels' text decoder against torch's decoder, for each instruction set of this CPU."""

import numpy as np
import pytest
import torch
from qwen3_vl_reference import (
    DECODER_KINDS,
    PagedRows,
    make_prompt,
    make_reference,
    ragged_steps,
    run_rows,
    whole_steps,
)

from mmengine.models.decoder.native_text import NativeTextDecoder
from mmengine.models.decoder.text import TextDecoder
from mmengine.native.rotary import RotaryTable
from mmengine.runtime.attention.native_paged import NativePagedAttention
from mmengine.runtime.attention.torch_paged import TorchPagedAttention
from mmengine_qwen3_vl import plugin

# Bounds on the largest and the mean difference between two decoders' logits. The logits lie between about -7
# and 7. In bfloat16 the decoder sums in another order than torch, so some values are rounded differently,
# which affects all later layers. The kernels' attention also rounds less often.
BOUNDS = {
    ("float32", "torch"): (1e-4, 1e-5),
    ("float32", "kernels"): (1e-4, 1e-5),
    ("bfloat16", "torch"): (0.2, 2e-3),
    ("bfloat16", "kernels"): (0.5, 0.04),
}
DTYPES = ("float32", "bfloat16")
PARTS = (
    [17],
    [3, ("image", (4, 6)), 5],
    [2, ("image", (2, 8)), 1, ("video", (3, 4, 4)), 6],
    [1],
    [30],
)


LIVELY = "untied, biases"  # Generates varied tokens; a tied head tends to repeat a token.


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {name: tmp_path_factory.mktemp("lively") for name in DECODER_KINDS}
    for name, folder in made.items():
        make_reference(folder, seed=3, **DECODER_KINDS[name])
    return made


def load(folder, dtype, library):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmengine.models.network.native.load", lambda: library)
        model = plugin.load_model(folder, device="cpu", dtype=dtype)
    assert type(model._text) is (TextDecoder if library is None else NativeTextDecoder)
    return model


def prompts_of(seed=5):
    rng = np.random.default_rng(seed)
    return [make_prompt(parts, rng) for parts in PARTS]


def paged(model, library, num_rows, **options):
    """Return the kernels' attention backend. With this backend, a step is a single C++ call."""
    return PagedRows(
        lambda spec, kv: NativePagedAttention(spec, kv, library), model.spec, model.dtype, num_rows, **options
    )


def logits_of(model, prompts, steps, attention):
    with torch.inference_mode():
        return run_rows(model, prompts, steps, attention)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DECODER_KINDS)
def test_logits_equal_the_torch_decoder(folders, library, name, dtype):
    reference, model = load(folders[name], dtype, None), load(folders[name], dtype, library)
    prompts = prompts_of()
    steps = ragged_steps(prompts, np.random.default_rng(6), 7)
    torch_paged = PagedRows(TorchPagedAttention, model.spec, model.dtype, len(prompts))
    wanted = logits_of(reference, prompts, steps, None)
    assert min(one.std() for one in wanted) > 0.5
    kernels = paged(model, library, len(prompts))
    for attention, of in ((None, "torch"), (torch_paged, "torch"), (kernels, "kernels")):
        got = logits_of(model, prompts, steps, attention)
        differences = torch.cat([(a - b).abs() for a, b in zip(got, wanted, strict=True)])
        largest, mean = BOUNDS[dtype, of]
        assert differences.max() < largest and differences.mean() < mean


def test_greedy_tokens_equal_the_torch_decoder(folders, library):
    reference, model = load(folders[LIVELY], "float32", None), load(folders[LIVELY], "float32", library)
    starts = torch.arange(12)
    wanted = greedy(reference, starts, PagedRows(TorchPagedAttention, model.spec, model.dtype, 12))
    assert len({tuple(row) for row in wanted.tolist()}) == 12
    assert np.mean([len(set(row)) for row in wanted.tolist()]) > 8
    assert torch.equal(greedy(model, starts, paged(model, library, 12)), wanted)


def greedy(model, tokens, attention, length=40):
    """Return `length` greedy tokens for each row, int64 [rows, length]. A row's prompt is a single token."""
    chosen = []
    with torch.inference_mode():
        for position in range(length):
            attention.begin([(row, 1) for row in range(len(tokens))])
            positions = torch.full((3, len(tokens)), position)
            hidden = model.forward(model.embed(tokens), None, positions, attention)
            tokens = model.logits(hidden).argmax(-1)
            chosen.append(tokens)
    return torch.stack(chosen, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_call_equals_the_two_halves(folders, library, dtype):
    """A single C++ call for a step, and two calls per layer (before and after attention), give the same
    bits.
    """
    model, prompts = load(folders["tied"], dtype, library), prompts_of()
    halves = paged(model, library, len(prompts), hide=("step_address",))
    assert not hasattr(halves, "step_address")
    steps = ragged_steps(prompts, np.random.default_rng(7), 9)
    one = logits_of(model, prompts, steps, paged(model, library, len(prompts)))
    assert all(map(torch.equal, one, logits_of(model, prompts, steps, halves)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_for_any_number_of_threads(folders, library, dtype):
    model, prompts = load(folders["untied, biases"], dtype, library), prompts_of() * 8
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [
            logits_of(model, [prompt], whole_steps([prompt]), paged(model, library, 1))[0]
            for prompt in prompts[:5]
        ]
        torch.set_num_threads(2)
        together = logits_of(model, prompts, whole_steps(prompts), paged(model, library, len(prompts)))
    finally:
        torch.set_num_threads(before)
    for index, logits in enumerate(together):
        assert torch.equal(logits, alone[index % 5])


def test_a_row_of_nan_spoils_no_other(folders, library):
    model = load(folders["tied"], "float32", library)
    embeds, positions = torch.randn(6, 48), torch.zeros(3, 6, dtype=torch.int64)
    embeds[2] = torch.nan

    def forward(rows):
        attention = paged(model, library, len(rows))
        attention.begin([(row, 1) for row in range(len(rows))])
        return model.forward(embeds[rows], None, positions[:, rows], attention)

    together = forward([0, 1, 2, 3, 4, 5])
    assert together[2].isnan().all()
    assert torch.equal(together[[0, 1, 3, 4, 5]], forward([0, 1, 3, 4, 5]))


def test_a_tied_matrix_is_kept_once(folders, library):
    model = load(folders["tied"], "bfloat16", library)
    assert model._text._embedding is None
    ids = torch.arange(96)
    wanted = load(folders["tied"], "bfloat16", None).embed(ids)
    assert torch.equal(model.embed(ids), wanted)


def test_inputs_are_not_modified(folders, library):
    model = load(folders["tied"], "float32", library)
    embeds, deepstack = torch.randn(5, 48), torch.randn(2, 5, 48)
    before = embeds.clone(), deepstack.clone()
    attention = paged(model, library, 1)
    attention.begin([(0, 5)])
    model.forward(embeds, deepstack, torch.zeros(3, 5, dtype=torch.int64), attention)
    assert torch.equal(embeds, before[0]) and torch.equal(deepstack, before[1])


def test_torch_computes_unsupported_configs(folders, library):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmengine.models.network.native.load", lambda: library)
        model = plugin.load_model(folders["tied"], device="cpu", dtype="float16")
    assert type(model._text) is TextDecoder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_angle_table_grows_and_returns_equal_values(folders, library, dtype):
    rotary = load(folders["tied"], "float32", None)._text._rotary
    table = RotaryTable(library, rotary.axis, rotary.halves, dtype)
    for positions in (torch.randint(0, 900, (3, 7)), torch.randint(0, 5000, (5, 3)).t()[:, ::2]):
        for got, wanted in zip(table.rows(positions), rotary.halves(positions), strict=True):
            assert torch.equal(got, wanted.to(dtype).float())
    with pytest.raises(ValueError, match="negative"):
        table.rows(torch.tensor([[0], [-1], [0]]))
