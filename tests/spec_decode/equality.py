"""Runs the same requests with and without drafts, and compares the answers. Includes a drafter that knows the
answers and adds errors.
"""

import math
import random
import secrets
import zlib
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest

from mmengine import registry
from mmengine.config import EngineConfig
from mmengine.core.outputs import Stats
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.options import Options, make_sampling
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.text.request_output import Completion
from mmengine.spec_decode.base import Proposed
from mmengine.spec_decode.registry import DRAFTERS
from mmengine.structured_output.request.spec import grammar_of
from mmengine_shapes.questions import clip_questions, image_questions, scene_schema
from mmengine_shapes.scenes import random_clip, random_scene
from tests.parity.parity_cases import load_processor
from tests.structured.strategies import random_schemas

TEXTS = ("What is 3 plus 4?", "Who are you?", "Describe a square, at length, in JSON.", "a a a b a a a b a a")
LARK = 'start: item ("," item)*\nitem: "circle" | "square" NUMBER\nNUMBER: /[0-9]{1,3}/'
GRAMMARS = (
    {"regex": "(circle|square){1,4} [0-9]{2,6}"},
    {"regex": "[a-z]{3,20}"},
    {"choice": ["a red circle", "a red square above", "ça", "a"]},
    {"lark": LARK},
)
STOPS = ((" the", "e "), ("is",), ("circle", "qu", "."), ("1", "zz"))
REASONING_END = 1535  # </think>


@dataclass(frozen=True)
class Asked:
    """Maps request ids to (prompt, options)."""

    by_id: dict

    def __len__(self):
        return len(self.by_id)

    def kinds(self):
        """Return the number of requests of each kind."""
        found = Counter()
        for prepared, options in self.by_id.values():
            sampling, form = options.sampling, options.grammar
            found.update([media.item.modality for media in prepared.media] or ["text"])
            found["sampled"] += sampling.temperature > 0
            found["without a seed"] += sampling.seed is None
            found["penalties"] += bool(sampling.presence_penalty or sampling.frequency_penalty)
            found["stops"] += bool(sampling.stop)
            found["several answers"] += sampling.n > 1
            found["likelihoods"] += sampling.logprobs is not None
            found["JSON"] += form is not None and form.kind == "json_schema"
            found["other forms"] += form is not None and form.kind != "json_schema"
            found["reasoning"] += bool(options.reasoning)
        return found


def mixed(count, seed=0, most_tokens=40):
    """Return `count` requests: a third have an image, a tenth have a video, and about half have a grammar.
    Some grammars begin after reasoning. Requests are greedy or sampled, with or without a seed. Some are
    repeated.
    """
    rng, processor = random.Random(seed), load_processor()
    forms = [scene_schema(), *random_schemas(max(4, count // 6))]
    pictures, clips = _scenes(rng, 3 + count // 20), _clips(rng, 2 + count // 50)
    asked = {}
    for number in range(count):
        name = f"r{number}"
        if number > 3 and rng.random() < 0.15:
            prepared, options = asked[f"r{rng.randrange(number)}"]
            asked[name] = prepared, replace(options, request_id=name)
            continue
        kind, task = rng.random(), ""
        prompt = Prompt.of(rng.choice(TEXTS))
        if kind < 0.35:
            task, prompt = _about(rng, "image", *rng.choice(pictures))
        elif kind < 0.45:
            _, prompt = _about(rng, "video", *rng.choice(clips))
        grammar, reasons = None, False
        if rng.random() < 0.5 or task == "json":
            grammar, reasons = _form(rng, forms, task)
        sampling = _sampling(rng, number, most_tokens, grammar is not None)
        if reasons:
            sampling.setdefault("logit_bias", {})[REASONING_END] = 4.0 + 4 * rng.randrange(4)
        options = Options(make_sampling(sampling), name, grammar=grammar, reasoning=reasons)
        asked[name] = prompt.prepare(processor), options
    return Asked(asked)


def _scenes(rng, count):
    """Return `count` pairs of a picture and {task: its questions}."""
    scenes = [random_scene(rng, side=rng.choice((64, 96, 128))) for _ in range(count)]
    return [(scene.draw(), image_questions(scene, rng)) for scene in scenes]


def _clips(rng, count):
    clips = [random_clip(rng, side=rng.choice((64, 96)), frames=4) for _ in range(count)]
    return [([np.asarray(frame) for frame in clip.frames()], clip_questions(clip, rng)) for clip in clips]


def _about(rng, kind, media, questions):
    """Return a task, and a prompt with its question about an image or a video."""
    task, pairs = rng.choice(list(questions.items()))
    parts = [{"type": kind}, {"type": "text", "text": rng.choice(pairs or [("What is it?", "")])[0]}]
    return task, Prompt(messages=[{"role": "user", "content": parts}], **{f"{kind}s": [media]})


def _form(rng, forms, task):
    """Return a grammar, and whether it begins after reasoning."""
    form = {
        "type": "json_schema",
        "json_schema": {"schema": forms[0] if task == "json" else rng.choice(forms)},
    }
    if rng.random() < 0.2:
        form["on_truncation"] = "close"
    grammar = grammar_of(form) if rng.random() < 0.7 else grammar_of(grammar=rng.choice(GRAMMARS))
    return grammar, rng.random() < 0.2


def _rules(rng):
    """Return random sampling options that penalise or exclude tokens."""
    words = [tuple(rng.randrange(1510) for _ in range(rng.randint(1, 3))) for _ in range(4)]
    given = {"no_repeat_ngram_size": rng.randint(1, 4)} if rng.random() < 0.6 else {}
    given |= {"bad_words_ids": words[:2]} if rng.random() < 0.5 else {}
    given |= (
        {"sequence_bias": [(word, rng.uniform(-5, 5)) for word in words[2:]]} if rng.random() < 0.5 else {}
    )
    given |= {"suppress_tokens": [rng.randrange(1510) for _ in range(3)]} if rng.random() < 0.5 else {}
    return given | ({"typical_p": 0.7} if rng.random() < 0.3 else {})


def _sampling(rng, seed, most_tokens, in_form):
    most_tokens = most_tokens * 2 if in_form else most_tokens
    given = {"max_tokens": rng.randint(1, most_tokens), "seed": None if rng.random() < 0.3 else seed}
    if rng.random() < 0.6:
        given["temperature"] = rng.choice((0.7, 1.5))
        given |= rng.choice(({}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 9, "top_p": 0.9}))
    if rng.random() < 0.3:
        names = rng.sample(("presence_penalty", "frequency_penalty"), rng.randint(1, 2))
        given |= {name: rng.uniform(-0.5, 1.5) for name in names}
    if rng.random() < 0.2:
        given["repetition_penalty"] = rng.choice((0.9, 1.3))
    if rng.random() < 0.2:
        given["logit_bias"] = {rng.randrange(1536): rng.uniform(-5, 5) for _ in range(5)}
    if rng.random() < 0.4:
        given["logprobs"] = rng.randint(0, 4)
    if rng.random() < 0.15:
        given["n"] = rng.randint(2, 3)
    if not in_form:
        own = random.Random(seed)
        if own.random() < 0.2:
            given |= _rules(own)
        if rng.random() < 0.4:
            given["stop"] = rng.choice(STOPS)
        if rng.random() < 0.3:
            given["stop_token_ids"] = rng.sample(range(1536), 6)
        if rng.random() < 0.3:
            given["min_tokens"] = rng.randint(1, given["max_tokens"])
        given["ignore_eos"] = rng.random() < 0.3
    return given


@dataclass(frozen=True)
class Answers:
    by_id: dict[str, Completion]
    stats: Stats
    drafting: object  # the Drafting of runtime/drafting/next_drafts.py; None without drafters

    @property
    def truth(self):
        """Return the tokens of every choice, keyed by the core's request id."""
        return {
            f"{name}/{choice.index}" if len(answer.choices) > 1 else name: choice.token_ids
            for name, answer in self.by_id.items()
            for choice in answer.choices
        }


@contextmanager
def drawn_alike():
    """Return a context in which the random seeds of requests are reproducible."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "randbits", random.Random(0).getrandbits)
        yield


def answers(asked, model=None, log=None, arrivals=None, steer=None, **options):
    """Run an engine on the requests and return the answers. With `arrivals` (a random.Random), requests
    arrive at random between steps. Without `arrivals`, all requests arrive before the first step. `steer` is
    called with the executor before the first step.
    """
    waiting, found, texts = list(asked.by_id.values())[::-1], {}, {}
    config = EngineConfig(**{"max_model_len": 256, "draft_policy": "all", **options})
    with drawn_alike(), Engine(model, dtype="float32", config=config, log=log) as engine:
        if steer is not None:
            steer(engine.built.executor)
        while waiting or not engine.is_idle:
            while waiting and (arrivals is None or arrivals.random() < 0.8):
                engine.submit_prepared(*waiting.pop())
            for output in engine.step():
                place = output.request_id, output.index
                texts[place] = texts.get(place, "") + output.text
                if output.completion is not None:
                    found[output.request_id] = output.completion
        for name, answer in found.items():
            assert [choice.text for choice in answer.choices] == [
                texts[name, choice.index] for choice in answer.choices
            ]
        return Answers(found, engine.stats(), engine.built.executor._runner._drafting)


def assert_same(found, want):
    assert found.by_id.keys() == want.by_id.keys()
    for name, answer in want.by_id.items():
        for got, due in zip(found.by_id[name].choices, answer.choices, strict=True):
            assert got.token_ids == due.token_ids, name
            assert (got.finish_reason, got.detail, got.text) == (due.finish_reason, due.detail, due.text), (
                name
            )
            _assert_same_logprobs(got.logprobs, due.logprobs)


def _assert_same_logprobs(got, due):
    assert (got is None) == (due is None)
    for mine, theirs in zip(got or (), due or (), strict=True):
        assert mine[0][0] == theirs[0][0] and len(mine) == len(theirs)
        # A step with another shape sums in another order: logprobs differed by up to 2.3e-5.
        assert np.allclose([value for _, value in mine], [value for _, value in theirs], atol=1e-4)
        kept = [value for _, value in theirs[1:]]
        sure = {token for token, value in theirs[1:] if value > min(kept) + 1e-4}
        assert sure <= {token for token, _ in mine[1:]}


@contextmanager
def known_as(name, make):
    """Return a context in which `spec=name` selects the drafter from `make`, as if it were an installed
    plugin.
    """
    with pytest.MonkeyPatch.context() as patch:
        declare_drafter(patch, name, lambda: make)
        yield


def declare_drafter(patch, name, load):
    """Make `name` the only entry point for drafters, with the loader `load`. `patch`: pytest's
    MonkeyPatch.
    """
    installed = registry.entry_points
    point = SimpleNamespace(name=name, value=f"theirs:{name}", dist=None, load=load, extras=())

    def entry_points(group):
        return [point] if group == DRAFTERS.group else installed(group=group)

    patch.setattr(registry, "entry_points", entry_points)


class Scripted:
    """Proposes the tokens in `truth`, or too few, too many, wrong or no tokens. The choice depends only on
    the request, the answer's length and `seed`. `most_of` maps the number of a
    `propose` call (from 0) to the call's draft limit.
    """

    name = "scripted"

    def __init__(self, truth, seed=0, vocab_size=1536, most_of=lambda step: math.inf):
        self._truth, self._seed, self._vocab_size, self._most_of = truth, seed, vocab_size, most_of
        self._requests, self._step = {}, -1
        self.num_true = 0  # drafts that match the answer

    def __call__(self, max_rows):
        return self

    def admit(self, row, request, texts):
        assert row not in self._requests
        self._requests[row] = request
        return True

    def leave(self, row, texts):
        self._requests.pop(row, None)

    def propose(self, rows, texts, most):
        self._step += 1
        limit = self._most_of(self._step)
        drafts = [self._of(row, texts, min(room, limit)) for row, room in zip(rows.tolist(), most.tolist())]
        flat = np.array([token for each in drafts for token in each], np.int32)
        return Proposed(flat, np.array([len(each) for each in drafts], np.intp))

    def _of(self, row, texts, room):
        request, length = self._requests[row], int(texts.lengths[row])
        truth, num_said = self._truth[request.request_id], length - int(texts.num_prompt[row])
        known = texts.tokens[row, :length].tolist()
        assert known == [*request.prompt_token_ids.tolist(), *truth[:num_said]]
        rng = random.Random(zlib.crc32(f"{self._seed} {request.request_id} {num_said}".encode()))
        rest = truth[num_said:]
        drafts = rest + [rng.randrange(self._vocab_size) for _ in range(2)]
        kind = rng.choice(("true", "true", "beyond", "short", "wrong", "nonsense", "none"))
        if kind == "short":
            drafts = rest[: rng.randint(0, 3)]
        elif kind == "true":
            drafts = rest
        elif kind == "wrong":
            drafts[min(rng.randint(0, 4), len(drafts) - 1)] = rng.randrange(self._vocab_size)
        elif kind == "nonsense":
            drafts = [rng.randrange(self._vocab_size) for _ in range(rng.randint(1, 8))]
        elif kind == "none":
            drafts = []
        drafts = drafts[: int(room)]
        self.num_true += sum(a == b for a, b in zip(drafts, rest))
        return drafts
