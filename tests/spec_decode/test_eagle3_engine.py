"""Tests that an EAGLE-3 head changes no token, and that the head's KV equals the KV from a single prefill."""

import random
import shutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mmengine.build import build
from mmengine.config import EngineConfig
from mmengine.core.executor import PENDING
from mmengine.errors import ConfigError, ModelError
from mmengine.models.plugin import AuxHiddenStates
from mmengine.native import library
from mmengine.runtime.attention.base import AttentionMeta
from mmengine.runtime.attention.torch_paged import TorchPagedAttention
from mmengine.runtime.device.cpu import CpuDevice
from mmengine.runtime.drafting import drafters
from mmengine.runtime.drafting.head.network import kv_spec
from mmengine.runtime.kv.pool import KVPool
from mmengine.serve.engine.engine import Engine
from mmengine_shapes import draft_head_path
from mmengine_shapes.questions import scene_schema
from tests.spec_decode.draft_control import Granting
from tests.spec_decode.eagle3_heads import FAMILIES

scenes = pytest.importorskip("mmengine_shapes.scenes")
FORM = {"type": "json_schema", "json_schema": {"schema": scene_schema()}}
TEXTS = ("Describe the image as JSON.", "Describe the image.", "What happens in the video?")
LONGEST = {"max_model_len": 96}  # some answers reach this length
# With these settings a single request may hold all blocks.
TIGHT = {"max_num_seqs": 6, "token_budget": 24, "num_blocks": 7, **LONGEST}


def prompts(count):
    """Yield prompts in a cycle: two prompts with the same image, a video prompt, a text prompt."""
    for number in range(count):
        rng = random.Random(number // 2)
        if number % 4 == 2:
            media = [{"type": "video", "video": scenes.random_clip(rng, side=96, frames=4).frames()}]
        else:
            image = scenes.random_scene(rng, side=160).draw()
            media = [{"type": "image", "image": image}] if number % 4 < 2 else []
        text = {"type": "text", "text": TEXTS[2 if number % 4 == 2 else number % 2]}
        yield [{"role": "user", "content": [*media, text]}]


def answers(count, sampling, **settings):
    with Engine(config=EngineConfig(draft_policy="all", **settings)) as engine:
        found = engine.generate(list(prompts(count)), max_tokens=70, **sampling)
        stats = engine.stats()
    return [(each.token_ids, each.finish_reason) for each in found], stats


SWAP = {**TIGHT, "swap_blocks": 30, "preempt_mode": "swap"}
CASES = [
    {},
    {"temperature": 1.2, "seed": 5},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "ignore_eos": True},
    {"temperature": 0.8, "seed": 3, "top_k": 20, "stop": [" is a"], "min_tokens": 4},
]


@pytest.mark.parametrize("sampling", CASES)
def test_a_head_changes_no_token(sampling):
    """Small KV pools cause preemption, swapping, split prompts and images, and prefix cache hits."""
    want, plain = answers(16, sampling, spec="none", **LONGEST)
    for settings in (LONGEST, TIGHT, SWAP):
        found, stats = answers(16, sampling, spec="eagle3", **settings)
        assert found == want
        if settings is LONGEST:
            assert stats.steps < plain.steps
        else:
            assert stats.num_preemptions or "stop" in sampling


def test_a_head_reads_no_pooled_token_without_a_successor():
    """A pooled prompt of one token gets no next token. The head once failed, and dropped a step's drafts."""
    with Engine(config=EngineConfig(spec="eagle3", draft_policy="all")) as engine:
        assert engine.embed([[5]]).shape == engine.embed(["a"]).shape
        engine.generate(list(prompts(2)), max_tokens=8)
        engine.embed([[7], [9]])
        assert engine.built.executor._runner._drafting.report == [("eagle3", 0)]


def test_the_prefix_cache_hits_equal_a_run_without_a_head():
    """A head loses at most 16 % of the cached tokens, because its KV for a block also depends on the next
    token.
    """
    hits = [answers(16, {}, spec=spec)[1].num_cached_tokens for spec in ("none", "eagle3")]
    assert hits[0] > 0 and hits[0] - hits[1] <= 16 * hits[0] // 100


def states_of_one_pass(built, request, token_ids, media):
    """Return the head's inputs from a single prefill with all tokens: auxiliary states [n, number of
    auxiliary layers * hidden_size], tokens int64 [n], and positions int64 [3, n].
    """
    model, head, size = (
        built.executor._runner._model,
        built.executor._runner._drafting.head._head,
        len(token_ids),
    )
    spec, hidden = model.spec, model.spec.hidden_size
    positions, delta = built.plugin.positions(request.prompt_token_ids, request.media)
    further = np.arange(len(request.prompt_token_ids), size) + delta
    positions = np.concatenate((positions, np.tile(further, (3, 1))), axis=1)[:, :size]
    positions = torch.from_numpy(positions.astype(np.int64))
    ids = torch.tensor(token_ids, dtype=torch.int64)
    embeds, deepstack = model.embed(ids).clone(), torch.zeros(spec.num_deepstack, size, hidden)
    for each in media:
        features = model.encode(torch.from_numpy(each.patches), [each.item.grid])
        layers = features.view(len(features), -1, hidden)
        places = np.concatenate([np.arange(start, start + length) for start, length in each.item.runs])
        there = places < size
        embeds[places[there]] = layers[there, 0]
        deepstack[:, places[there]] = layers[there, 1:].transpose(0, 1)
    aux_hidden_states = AuxHiddenStates(
        head.config.aux_layers, torch.empty(size, len(head.config.aux_layers) * hidden)
    )
    model.forward(embeds, deepstack, positions, dense(spec, size)[1], aux_hidden_states)
    return aux_hidden_states.rows, ids, positions


def head_kv_of_one_pass(built, request, token_ids, media):
    """Return the head's K and V after a single prefill, [tokens - 1, 2, kv heads, head_dim]."""
    head, size = built.executor._runner._drafting.head._head, len(token_ids)
    aux_hidden_states, ids, positions = states_of_one_pass(built, request, token_ids, media)
    pool, port = dense(kv_spec(head.config), size - 1)
    head.forward(head.fuse(aux_hidden_states[:-1]), head.embed(ids[1:]), positions[:, :-1], port, 0)
    return pool.blocks[0, 1:].transpose(1, 2).flatten(0, 1)[: size - 1]


def drafts_of_one_pass(built, request, token_ids, media, count, given=()):
    """Return `count` drafts after a text and the drafts `given`. Computes each draft in a pass over all
    tokens.
    """
    head = built.executor._runner._drafting.head._head
    aux_hidden_states, ids, positions = states_of_one_pass(built, request, token_ids, media)
    hidden, tokens, positions = head.fuse(aux_hidden_states[:-1]), ids[1:], positions[:, :-1]
    for number in range(len(given) + count):
        _, port = dense(kv_spec(head.config), len(tokens))
        z, carry = head.forward(hidden, head.embed(tokens), positions, port, 0)
        hidden = torch.cat((hidden, carry[-1:]))
        own = torch.tensor(given[number : number + 1], dtype=torch.int64)
        tokens = torch.cat((tokens, own if len(own) else head.tokens(head.logits(z[-1:]))))
        positions = torch.cat((positions, positions[:, -1:] + 1), 1)
    return tokens[len(ids) - 1 + len(given) :].tolist()


def dense(spec, size):
    """Return a KV pool, and its attention for a step with one row of `size` tokens in consecutive blocks."""
    pool = KVPool(spec, -(-size // 16) + 1, 16, torch.float32, CpuDevice())
    port = TorchPagedAttention(spec, pool)
    lengths = np.array([size], np.int32)
    port.begin(AttentionMeta(lengths, lengths, np.arange(16, 16 + size), np.arange(1, pool.num_blocks)[None]))
    return pool, port


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 40},  # split prompts and images, and prefix hits
        {"num_blocks": 6, "max_model_len": 72},  # preempted rows that reach max_model_len
        {"num_blocks": 6, "max_model_len": 72, "swap_blocks": 12, "preempt_mode": "swap"},
        {"num_blocks": 40, "spec": "auto"},  # drafts after tokens that a grammar forces
    ],
)
@pytest.mark.parametrize("pauses", [False, True])
def test_the_kv_equals_a_single_pass(settings, pauses):
    """Compares positions whose next token is known. Skips rows whose auxiliary states were deferred by
    `pauses`.
    """
    sizes = {"max_num_seqs": 3, "token_budget": 17, "draft_policy": "all", "spec": "eagle3", **settings}
    _skip_without_a_head(sizes["spec"])
    built = build(config=EngineConfig(**sizes))
    if pauses:
        Granting(built.executor, lambda step: 7 if step % 9 < 2 else 0)
    runner, compared, caught, cut = built.executor._runner, 0, 0, set()
    requests = {}
    engine = Engine(builder=lambda *_, **__: built)
    with engine:
        head = runner._drafting.head
        prepare, caught_up = head.prepare, head.catch_up

        def prepared(plan):
            requests.update((each.row, each.request) for each in plan.admitted)
            for row, computed in zip(plan.rows.tolist(), plan.num_computed.tolist()):
                media = runner._media.get(requests[row].request_id, ())
                runs = [(each.item.modality, run) for each in media for run in each.item.runs]
                cut.update(kind for kind, (start, length) in runs if start < computed < start + length)
            return prepare(plan)

        def watched(seen, texts):
            nonlocal compared, caught
            waited = head.deferred.num_tokens
            caught_up(seen, texts)
            caught += waited > head.deferred.num_tokens
            if seen is None:
                return
            plan = seen.plan
            assert PENDING not in plan.input_ids
            for place, row in enumerate(plan.rows.tolist()):
                swapped = pauses and "swap_blocks" in settings  # swapping drops a row's deferred states
                assert head.keys.whole[row] or swapped
                if head.deferred.is_late(np.array([row]))[0] or not head.keys.whole[row]:
                    continue
                token_ids = texts.tokens[row, : texts.lengths[row]]
                computed = int(plan.num_computed[place] + plan.num_scheduled[place])
                known = min(len(token_ids) - 1, computed)
                media = runner._media.get(requests[row].request_id, ())
                want = head_kv_of_one_pass(built, requests[row], token_ids[: known + 1], media)
                pool = head._kv
                slots = np.arange(known)
                table = plan.block_table[place]
                got = pool.blocks[0][table[slots // 16].astype(np.int64), :, slots % 16]
                assert torch.allclose(got, want, atol=1e-5, rtol=1e-5)
                compared += known

        head.prepare, head.catch_up = prepared, watched
        how = {"response_format": FORM} if "spec" in settings else {"ignore_eos": True}
        # submit all prompts before the first step, so that preparation times have no effect
        for prompt in prompts(4):
            engine.submit(prompt, max_tokens=40, **how)
        while engine.has_work:
            engine.step()
        stats = engine.stats()
    assert bool(stats.num_preemptions) == (settings["num_blocks"] < 40)
    assert stats.num_cached_tokens and min(each.accepted for each in stats.drafts.values()) > 3
    assert cut == {"image", "video"}
    assert compared > 200 and (caught > 2) == pauses


def _skip_without_a_head(spec):
    if spec == "auto" and library.load() is None:
        pytest.skip(library.describe())


@pytest.fixture
def attentive_head(tmp_path):
    """Return the included checkpoint's head, with attention that depends more strongly on positions."""
    folder = shutil.copytree(draft_head_path(), tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "q_proj" in name or "k_proj" in name]:
        tensors[name] = 3 * torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(1))
        tensors[name] /= tensors[name].shape[1] ** 0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("spec", ["eagle3", "auto"])
def test_drafts_equal_passes_over_the_whole_text(spec, attentive_head, monkeypatch):
    """Compares drafts in prompts with an image, a video and text alone. With `spec` "auto", the engine also
    drafts after forced tokens.
    """
    _skip_without_a_head(spec)
    point = SimpleNamespace(load=lambda: lambda: attentive_head)
    monkeypatch.setattr(drafters, "entry_points", lambda group: [point])
    sizes = {"num_draft_tokens": 7, "max_num_seqs": 4, "num_blocks": 40, "max_model_len": 104}
    built = build(config=EngineConfig(spec=spec, draft_policy="all", **sizes))
    runner, requests, compared, num_given = built.executor._runner, {}, Counter(), 0
    with Engine(builder=lambda *_, **__: built) as engine:
        head = runner._drafting.head
        admit, propose = head.admit, head.propose

        def admitted(row, request, texts):
            requests[row] = request
            return admit(row, request, texts)

        def proposed(rows, texts, most, *given):
            nonlocal num_given
            found = propose(rows, texts, most, *given)
            if found is None:
                return None
            before = [[]] * len(rows)
            if given and given[0] is not None:
                before = [ids[:count].tolist() for ids, count in zip(*given[0])]
            parts = np.split(found.token_ids, np.cumsum(found.counts))
            for row, drafts, forced in zip(rows.tolist(), parts, before):
                token_ids, media = texts.tokens[row, : texts.lengths[row]], requests[row].media
                pixels = runner._media.get(requests[row].request_id, ())
                want = drafts_of_one_pass(built, requests[row], token_ids, pixels, len(drafts), forced)
                assert drafts.tolist() == want
                compared[media[0].modality if media else "text"] += len(drafts)
                num_given += len(forced) if len(drafts) else 0
            return found

        head.admit, head.propose = admitted, proposed
        form = FORM if spec == "auto" else None
        engine.generate(list(prompts(4)), max_tokens=12, response_format=form, ignore_eos=form is None)
        assert not any(runner._drafting.failures)
    assert compared.keys() == {"image", "video", "text"} and min(compared.values()) > 15
    assert (num_given > 10) == (spec == "auto")


def test_settings_that_do_not_fit_are_refused(tmp_path):
    for settings, words in (
        ({"spec": "eagle3", "num_draft_tokens": 8}, "0 to 7"),
        ({"spec": "ngram", "num_draft_tokens": 65}, "num_draft_tokens must lie in 0 to 64"),
        ({"spec": "eagle3", "compat": "vllm"}, "compat"),
        ({"spec": "none", "num_draft_tokens": 3}, "spec is none"),
        ({"spec": "clairvoyant"}, "known are"),
        ({"spec": "grammar", "lookahead_tokens": 2, "num_draft_tokens": 2}, "lookahead_tokens"),
    ):
        with pytest.raises(ConfigError, match=words):
            build(config=EngineConfig(**settings))
    with pytest.raises(ModelError, match="config.json"):
        build(config=EngineConfig(spec=f"eagle3={tmp_path}"))
    FAMILIES["specforge"]().save(tmp_path)
    with pytest.raises(ModelError, match="the head belongs to another model"):
        build(config=EngineConfig(spec=f"eagle3={tmp_path}"))
