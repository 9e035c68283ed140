"""Tests encoder calls that are replayed from a captured graph.

The tests check the chosen size, calls that are not replayed, and the features. A fake graph replaces the GPU
graph and repeats the captured operations over the same memory.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from repeater import Repeater
from tape import TapeRecorder

from mmengine.core.executor import EncodeItem
from mmengine.gpu.vision_ops import VisionOps, attend_by_frames, gives_known_numbers, rotate
from mmengine.models.plugin import EncoderSize, MediaInput
from mmengine.models.vision import tower
from mmengine.request import MediaItem, Request, SamplingParams
from mmengine.runtime.features import FeatureStore, encode
from mmengine.runtime.graphs import capture as capture_module
from mmengine.runtime.graphs.encoder import EncoderGraphs
from mmengine.runtime.graphs.encoder_sizes import (
    MOST_EMBEDS,
    PATCHES,
    SEGMENT_EMBEDS,
    SEGMENTS,
    STEP,
    embed_sizes,
    encoder_sizes,
    size_of,
)
from mmengine_qwen3_vl import plugin
from tests.qwen3_vl.qwen3_vl_reference import make_reference

CPU = torch.device("cpu")
SIZES = [EncoderSize(16, 1), EncoderSize(64, 3), EncoderSize(96, 6)]


def attend_masked(q, k, v, starts, longest):
    """Compute attention with shapes that depend only on q, as a capture requires. A mask separates the
    frames.

    The result is NaN for a patch without a frame, so that a wrong `starts` is detected.
    """
    frame = torch.searchsorted(starts[1:], torch.arange(len(q), dtype=torch.int32), right=True)
    same = frame[:, None] == frame
    out = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), attn_mask=same)
    return out.transpose(0, 1).where((frame < len(starts) - 1)[:, None, None], torch.nan)


def test_the_fake_attention_equals_attention_by_frames():
    assert gives_known_numbers(VisionOps(rotate, attend_masked), CPU, torch.float32, 16)


@pytest.mark.parametrize("most", [1, 7, 16, 17, 100, 300, MOST_EMBEDS])
def test_sizes_grow_to_the_most_and_waste_a_fifth(most):
    # Padding is at most a fifth of a size, or less than STEP embeddings.
    sizes = embed_sizes(most)
    assert sizes[-1] == most and sorted(set(sizes)) == list(sizes)
    for embeds in range(1, most + 1):
        size = next(size for size in sizes if size >= embeds)
        assert size - embeds < STEP or (size - embeds) / size <= 1 / 5


def test_sizes_are_few_and_no_larger_than_a_step():
    assert len(encoder_sizes(10**6, 2)) == 16 and encoder_sizes(10**6, 2)[-1] == EncoderSize(2048, 16)
    assert encoder_sizes(40, 2)[-1] == EncoderSize(160, 1) and encoder_sizes(40, 3)[-1].num_patches == 360


@given(st.integers(1, 700), st.integers(1, 30), st.integers(1, 600))
def test_the_smallest_size_that_holds_a_call_is_taken(embeds, segments, budget):
    sizes = encoder_sizes(budget, 2)
    found = size_of(sizes, 4 * embeds, segments)
    holding = [one for one in sizes if one.num_patches >= 4 * embeds and one.num_segments >= segments]
    if holding:
        assert found == holding[0]
    else:
        assert found == (PATCHES if embeds > min(budget, MOST_EMBEDS) else SEGMENTS)
    if segments * SEGMENT_EMBEDS <= embeds <= budget and embeds <= MOST_EMBEDS:
        assert found.num_patches == 4 * next(size for size in embed_sizes(budget) if size >= embeds)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a model with random weights. Its vision tower uses `attend_masked`."""
    folder = tmp_path_factory.mktemp("tower")
    make_reference(folder, seed=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tower, "vision_kernels", lambda *of: None)
        patch.setattr(tower, "vision_ops", lambda *of: VisionOps(rotate, attend_masked))
        return plugin.load_model(folder, device="cpu", dtype="float32")


def capture(model, recorder=None, sizes=SIZES):
    with torch.inference_mode():
        return EncoderGraphs(model.capturable_encoder(sizes[-1]), sizes, recorder or TapeRecorder())


@pytest.fixture(scope="module")
def graphs(model):
    return capture(model)


def pixels(grids, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (t * h * w, 96), dtype=np.uint8) for t, h, w in grids]


def launched(model, patches, grids):
    with torch.inference_mode():
        return model.encode(torch.from_numpy(np.concatenate(patches)), grids)


GRIDS = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)).map(
        lambda t: (t[0], 2 * t[1], 2 * t[2])
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=25, deadline=None)
@given(grids=GRIDS, seed=st.integers(0, 9))
@example(grids=[(1, 4, 4)] * 6, seed=0)  # fills every patch and segment in the largest size
@example(grids=[(6, 2, 2)], seed=0)
@example(grids=[(7, 2, 2)], seed=0)
def test_replayed_features_equal_a_launched_call(model, graphs, grids, seed):
    """Successive calls with images and videos of any size use the same memory."""
    patches = pixels(grids, seed)
    count, frames = sum(map(len, patches)), sum(t for t, _, _ in grids)
    before = dict(graphs.num_calls)
    with torch.inference_mode():
        leave(graphs, 1e4)
        found = graphs.encode(patches, grids)
    fits = count <= 96 and frames <= 6
    how = "replayed" if fits else PATCHES if count > 96 else SEGMENTS
    assert graphs.num_calls == before | {how: before[how] + 1}
    assert (found is None) == (not fits)
    if fits:
        wanted = launched(model, patches, grids)
        assert found.shape == wanted.shape and wanted.std() > 0.1
        assert (found - wanted).abs().max() < 2e-5


def leave(graphs, value):
    """Write `value` to all buffers that earlier calls may have changed."""
    encoder = graphs._encoder
    for tensor in (encoder._positions, encoder._cos, encoder._sin, encoder._features):
        tensor.fill_(value)


@settings(max_examples=8, deadline=None)
@given(GRIDS.filter(lambda grids: sum(t * h * w for t, h, w in grids) <= 80))
def test_padding_of_a_size_is_never_seen(model, grids):
    """Padding holds NaN. Like a GPU kernel, the attention here reads only a frame's own patches."""
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(model._vision, "ops", VisionOps(rotate, attend_by_frames))
        graphs = capture(model, Repeater(), [EncoderSize(96, 15)])
        patches = pixels(grids)
        leave(graphs, torch.nan)
        found = graphs.encode(patches, grids)
        assert (found - launched(model, patches, grids)).abs().max() < 2e-5
        assert graphs._encoder._features[len(found) :].isnan().all()


def test_each_size_is_captured_once_the_largest_first(model):
    class Noting(TapeRecorder):
        def __init__(self):
            super().__init__()
            self.sizes = []

        def record(self, compute):
            self.sizes.append(compute.args[0])
            return super().record(compute)

    recorder = Noting()
    graphs = capture(model, recorder)
    assert recorder.sizes == SIZES[::-1]
    with torch.inference_mode():
        for _ in range(3):
            graphs.encode(pixels([(1, 4, 4)]), [(1, 4, 4)])
    assert recorder.recorded == 3 and recorder.replayed == 3 == graphs.num_calls["replayed"]


@pytest.mark.parametrize("grid, rows", [((1, 4, 4), 12), ((1, 3, 4), 12), ((1, -2, -2), 4)])
def test_patches_that_contradict_their_grids_are_refused(graphs, grid, rows):
    with torch.inference_mode(), pytest.raises(ValueError, match="grid"):
        graphs.encode([np.zeros((rows, 96), np.uint8)], [grid])


def test_encoders_without_capture_are_launched(model, monkeypatch):
    monkeypatch.setattr(model._vision, "ops", None)
    assert model.capturable_encoder(SIZES[-1]) is None


def test_a_waiting_capture_is_reported_once_and_images_are_launched(model, monkeypatch):
    told = []
    monkeypatch.setattr(capture_module.log, "warning", lambda what, **facts: told.append((what, facts)))

    def attend_waiting(q, k, v, starts, longest):
        return attend_masked(q, k, v, starts[: len(starts.nonzero()) + 1], longest)

    monkeypatch.setattr(model._vision, "ops", VisionOps(rotate, attend_waiting))
    recorder = TapeRecorder()
    graphs = capture(model, recorder)
    ((what, facts),) = told
    assert "kernel by kernel" in what and "set cuda_graphs false" in what
    assert "num_patches=96" in facts["size"] and facts["reason"].endswith("when stream is capturing")
    store = FeatureStore(model.spec.hidden_size, model.spec.num_deepstack, 100)
    items, payloads = asked([(1, 4, 4), (1, 2, 2)])
    with torch.inference_mode():
        encode(model, items, payloads, store, CPU, graphs=graphs)
    assert len(store) == 2 and graphs.num_calls["capture_failed"] == 1 and not recorder.replayed


def asked(grids):
    """Return the items to encode (a request for each grid), and the requests' pixels."""
    items, payloads = [], {}
    for number, (grid, patches) in enumerate(zip(grids, pixels(grids, 7), strict=True)):
        name, count = f"r{number}", len(patches) // 4
        media = MediaItem(name.encode().ljust(32), "image", ((0, count),), grid)
        request = Request(name, np.zeros(count + 1, np.int32), SamplingParams(), (media,))
        items.append(EncodeItem(media.mm_hash, request, 0))
        payloads[name] = [MediaInput(media, patches)]
    return items, payloads


def features_in(store, item):
    return store._cache[store._places[item.key]]


@pytest.mark.parametrize("alone", [False, True])
def test_features_are_kept_when_the_next_call_writes_over_them(model, alone):
    """The feature store holds copies. With `alone`, each item is encoded in a separate call."""
    graphs = capture(model)
    store = FeatureStore(model.spec.hidden_size, model.spec.num_deepstack, 200)
    grids = [(1, 4, 4), (2, 4, 2), (1, 6, 4), (1, 2, 2), (1, 4, 8), (1, 8, 8)]
    items, payloads = asked(grids)
    with torch.inference_mode():
        for some in (items[:3], items[3:5], items[5:]):
            encode(model, some, payloads, store, CPU, graphs=graphs, alone=alone)
        for item, grid in zip(items, grids, strict=True):
            ((one,),) = [payloads[item.request.request_id]]
            wanted = launched(model, [one.patches], [grid])
            assert (features_in(store, item) - wanted).abs().max() < 2e-5
            if alone:
                assert torch.equal(features_in(store, item), graphs.encode([one.patches], [grid]))
    if not alone:
        assert graphs.num_calls["replayed"] == 3
