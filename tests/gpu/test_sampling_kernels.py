"""Tests that the Triton kernels sample the same tokens as torch's filters, noise and masks on a CPU."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmengine.gpu import sampling
from mmengine.request import SamplingParams
from mmengine.runtime.sampling import drawing, masking
from mmengine.runtime.sampling.drawing_gpu import draw_on_gpu
from mmengine.runtime.sampling.filters import apply_temperature, keep_top, top_bound
from mmengine.structured_output.rows.rows import Masks
from tests.runtime.sampling_bench import Bench, random_logits, random_sampling

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def kernels(kernel_device):
    """Return the kernels with chunks of 32 tokens, so that small vocabularies have several chunks."""
    from mmengine.gpu import sampling_kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling_kernels, "CHUNK", 32)
        yield sampling_kernels


@pytest.fixture
def steps(monkeypatch):
    """Draw on a CPU with separate torch operations (filters, then noise), without the C++ kernel."""
    monkeypatch.setattr(drawing, "draw_on_cpu", lambda *args: None)


@pytest.mark.parametrize("vocab_size", [1, 5, 61, 300])
def test_tokens_equal_the_steps(vocab_size, kernels, kernel_device, steps):
    random = np.random.default_rng(vocab_size)
    for _ in range(1 if vocab_size > 100 else 2):
        samplings = [random_sampling(random, vocab_size) for _ in range(6)]
        bench = Bench(vocab_size, samplings, random)
        logits = random_logits(random, 6, vocab_size)
        options, columns = bench.batch.columns["options"], bench.batch.columns
        got = draw_on_gpu(kernels, logits.to(kernel_device), options, columns, bench.batch.output_index)
        assert got.tolist() == bench.tokens(logits)


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 90), st.floats(0.001, 0.999), st.floats(0.05, 20), st.integers(0, 99))
def test_the_bound_keeps_the_same_as_sorting(kernels, kernel_device, vocab_size, share, heat, seed):
    """`top_p_bound` keeps the same tokens as `keep_top`, which sorts the logits."""
    random = np.random.default_rng(seed)
    logits = random_logits(random, 2, vocab_size)
    logits[:, 0] = logits[:, 0].clamp(min=0)  # keeps one logit finite
    top_p, temperature = torch.full((2,), share), torch.full((2,), heat)
    scaled = apply_temperature(logits, temperature[:, None])
    wanted = keep_top(scaled, torch.full((2, 1), vocab_size), top_p[:, None], vocab_size).isfinite()
    there = [each.to(kernel_device) for each in (logits, logits.amax(-1), temperature, top_p)]
    found = (scaled >= kernels.top_p_bound(*there).cpu()[:, None]) & scaled.isfinite()
    for row in range(2):
        if not torch.equal(found[row], wanted[row]):  # only the rounding of sums may cause a difference
            mass = scaled[row].double().softmax(-1)
            before = torch.stack([mass[scaled[row] > value].sum() for value in scaled[row]])
            assert (before - share).abs().min() < 1e-6


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=3), st.floats(0.001, 1), st.integers(0, 99))
def test_the_bound_among_the_best_is_that_of_the_filters(kernels, kernel_device, ks, share, seed):
    """The kernel's `top_k_bound` equals torch's `top_bound`."""
    random = np.random.default_rng(seed)
    logits = random_logits(random, len(ks), 70).clamp(min=-80, max=80)
    logits = (logits * 4).round() / 4 - 20  # with ties
    best, top_k = logits.topk(max(ks), dim=-1).values, torch.tensor(ks)
    top_p = torch.full((len(ks),), share)
    there = [each.to(kernel_device) for each in (best, top_k, top_p)]
    found = kernels.top_k_bound(*there).cpu()
    wanted = top_bound(logits, top_k[:, None], top_p[:, None], max(ks))[:, 0]
    for row, count in enumerate(ks):
        if found[row] != wanted[row]:  # only the rounding of sums may cause a difference
            mass = best[row, :count].double().softmax(-1)
            assert ((mass.cumsum(-1) - mass) - share).abs().min() < 1e-6


def test_a_rows_bound_and_logprobs_have_the_same_bits_in_any_batch(kernels, kernel_device):
    """A row has the same bits alone and in a batch. Alone, the row has another address and fewer best
    logits.
    """
    random = np.random.default_rng(4)
    logits = random_logits(random, 5, 301).to(kernel_device)
    likely, best = kernels.log_softmax(logits), logits.topk(99, dim=-1).values
    top_k, top_p = torch.tensor([3, 17, 40, 99, 16]), torch.tensor([0.9, 0.5, 0.99, 1.0, 0.2])
    top_k, top_p = top_k.to(kernel_device), top_p.to(kernel_device)
    bounds = kernels.top_k_bound(best, top_k, top_p)
    for row in range(5):
        one, count = slice(row, row + 1), int(top_k[row])
        assert torch.equal(kernels.log_softmax(logits[one].clone()), likely[one])
        assert torch.equal(kernels.top_k_bound(best[one, :count], top_k[one], top_p[one]), bounds[one])
    assert (likely - logits.double().log_softmax(-1)).abs().max() < 1e-5


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 77, 150])
def test_masks_exclude_the_same_as_on_a_cpu(vocab, kernels, kernel_device, monkeypatch):
    """The GPU's function masks three of five rows like the CPU's function. The logits have ties.

    The other two rows stay unchanged.
    """
    monkeypatch.setattr(masking, "sampling_kernels", lambda device: kernels)
    random = np.random.default_rng(vocab)
    logits = random.integers(-3, 4, (5, vocab)).astype(np.float32)
    selected = np.sort(random.permutation(5)[:3])
    bits = random.integers(0, 2**32, (3, -(-vocab // 32)), np.uint32)
    bits[:, 0] |= 1
    masks = Masks(selected, bits)
    there, here = torch.from_numpy(logits).to(kernel_device), torch.from_numpy(logits.copy())
    largest, tokens = masking.keep_allowed_on_gpu(there, masks)
    wanted_largest, wanted = masking.keep_allowed(here, masks, np.ones(3, bool))
    assert torch.equal(largest.cpu(), wanted_largest) and torch.equal(tokens.cpu(), wanted)
    assert torch.equal(there.cpu(), here)


def test_kernels_are_checked_before_use(kernels, kernel_device):
    assert sampling.gives_known_tokens(kernels, kernel_device)
    names = ("draw", "top_p_bound", "top_k_bound", "log_softmax", "keep_allowed")
    for name in names:
        wrong = SimpleNamespace(**{each: getattr(kernels, each) for each in names})
        right = getattr(kernels, name)
        if name == "keep_allowed":
            setattr(wrong, name, lambda logits, *of, right=right: right(logits.clone(), *of))
        else:
            setattr(wrong, name, lambda *of, right=right: right(*of) + 1)
        assert not sampling.gives_known_tokens(wrong, kernel_device)


def test_a_cpu_has_kernels_of_its_own():
    """On a CPU, the Triton kernels are not used."""
    assert sampling.sampling_kernels(CPU) is None


def test_without_triton_torch_samples_and_says_why(monkeypatch):
    """The test needs no GPU: only the type of the device "cuda" is read."""
    monkeypatch.setitem(sys.modules, "triton", None)
    sampling._checked_kernels.cache_clear()
    try:
        assert sampling.sampling_kernels(torch.device("cuda")) is None
        assert sampling.describe(torch.device("cuda")).startswith("torch (ModuleNotFoundError")
    finally:
        sampling._checked_kernels.cache_clear()


def test_no_kernel_is_compiled_anew_for_other_rows(kernels, kernel_device, monkeypatch):
    """`compile_all` compiles every kernel variant that steps use, with any number of rows.

    Triton compiles again if a pointer's alignment to 16 bytes or a number's divisibility by 16 changes, or if
    a number is 1. During a step, all rows would wait for the compiler.
    """
    if kernel_device.type != "cpu":
        pytest.skip("this test observes Triton's interpreter, which runs only on a CPU")
    from triton.runtime.interpreter import InterpretedFunction

    seen, run = {}, InterpretedFunction.run

    def noted(self, *arguments, **options):
        kinds = []
        for name, value in zip(self.arg_names, arguments, strict=False):
            is_tensor = isinstance(value, torch.Tensor)
            free = self.kwargs["do_not_specialize_on_alignment" if is_tensor else "do_not_specialize"] or ()
            kind = value.data_ptr() % 16 == 0 if is_tensor else (value == 1, value % 16 == 0)
            kinds.append(name in free or kind)
        seen.setdefault(self.__name__, set()).add(tuple(kinds))
        return run(self, *arguments, **options)

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    sampling.compile_all(kernels, 40, kernel_device)
    compiled = {name: set(kinds) for name, kinds in seen.items()}
    random = np.random.default_rng(2)
    for rows in (1, 2, 5):  # a single row, an even and an odd number
        for options in ({"top_k": 8 * rows}, {"top_p": 0.8}, {"min_p": 0.1}):
            bench = Bench(40, [SamplingParams(temperature=0.7, seed=1, **options)] * rows, random)
            columns = bench.batch.columns
            logits = random_logits(random, rows, 40)
            draw_on_gpu(kernels, logits, columns["options"], columns, bench.batch.output_index)
        kernels.log_softmax(logits)
        kernels.keep_allowed(logits, torch.arange(rows), torch.ones(rows, 2, dtype=torch.int32))
    assert seen == compiled and len(seen) == 5 and all(len(kinds) == 1 for kinds in seen.values())
