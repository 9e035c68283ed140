"""An engine without a model: the real core, and an executor with prescribed outputs."""

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.continuation import open_log
from mmengine.core.engine import EngineCore
from mmengine.core.executor import StepResult
from mmengine.core.resume import ResumeState
from mmengine.errors import InvalidMedia, InvalidRequest
from mmengine.models.plugin import Prepared
from mmengine.structured_output.rows.grammars import Grammars

EOS = 256


class ByteTokenizer:
    """A tokenizer whose tokens are bytes; 256 ends the text."""

    vocab_size = 257
    special_ids = frozenset({EOS})

    def encode(self, text, *, allow_special=False):
        return list(text.encode())

    def decode(self, token_ids, *, skip_special_tokens=True):
        return bytes(token for token in token_ids if token != EOS).decode(errors="replace")

    def token_bytes(self):
        return [bytes([token]) for token in range(EOS)] + [b"<end>"]


class EchoProcessor:
    """A processor that uses the last message's text as prompt. The word `bad` counts as broken media."""

    tokenizer = ByteTokenizer()
    eos_token_ids = (EOS,)
    generation_defaults = {}
    max_image_pixels = 2**16
    max_prompt_tokens = 2**24
    fingerprint = "00"
    template_variables = frozenset({"messages", "tools"})

    def call_format(self, template_options=None):
        return "json"

    def count_images(self, text):
        return text.count("<image>")

    def prepare(self, messages, *, images=(), videos=(), base_folder=None, **options):
        if not messages:
            raise InvalidRequest("there are no messages")
        content = messages[-1]["content"]
        if not isinstance(content, str):
            content = "".join(part.get("text", "") for part in content)
        return self.prepare_text(content)

    def prepare_text(self, text, *, images=(), videos=(), media_options=None):
        if "bad" in text:
            raise InvalidMedia("image 1 is no image")
        return Prepared(np.frombuffer(text.encode(), np.uint8).astype(np.int32), (), text)


class TurnEcho(EchoProcessor):
    """A processor for sessions. A user's turn becomes <text>; a part without text becomes F."""

    frames_in_patch = 2

    def around_film(self, template_options=None):
        return [], []

    def prepare_turn(self, content, *, system, opens, closes, **options):
        opening = {"first": f"{system}<", "next": "><", "": ""}[opens]
        text = "".join(part.get("text", "F") for part in content) + (">" if closes else "")
        if "bad" in text:
            raise InvalidMedia("image 1 is no image")
        ids = np.frombuffer((opening + text).encode(), np.uint8).astype(np.int32)
        return Prepared(ids, (), opening + text, len(opening))


class EchoExecutor:
    """Answers with the prompt in capitals and EOS. Fails once, at the step `fail_at`."""

    needs_plan = True
    drafters: ClassVar[list] = []
    graph_counts: ClassVar[dict] = {}

    def __init__(self, watcher, fail_at=None):
        self._watcher = watcher
        self._rows = {}
        self._results = deque()
        self._steps = 0
        self._fail_at = fail_at
        self.attached = set()
        self.known = {}  # adapter digest -> function that reads the adapter
        self.largest = 0

    def answer_to(self, prompt):
        return prompt.upper()

    def attach(self, request_id, media):
        assert request_id not in self.attached
        self.attached.add(request_id)

    def release(self, request_id):
        self.attached.discard(request_id)

    def know_adapter(self, digest, read):
        self.known[digest] = read

    def forget_adapter(self, digest):
        del self.known[digest]

    def dispatch(self, plan):
        for admission in plan.admitted:
            self._rows[admission.row] = admission.request
            self._watcher.admit(admission.row, admission.request, admission.token_ids)
        self.largest = max(self.largest, len(plan.rows))
        sampled = plan.rows[plan.sample]
        known = (plan.num_computed + plan.num_scheduled)[plan.sample]
        tokens, stops = [], []
        for index, (row, count) in enumerate(zip(sampled.tolist(), known.tolist(), strict=True)):
            request = self._rows[row]
            answer = self.answer_to(
                bytes(token for token in request.prompt_token_ids.tolist() if token < EOS)
            )
            place = count - len(request.prompt_token_ids)
            tokens.append(answer[place] if place < len(answer) else EOS)
            if tokens[-1] == EOS:
                stops.append((index, "eos"))
        token_ids = np.array(tokens, np.int32)
        for index in self._watcher.feed(sampled, token_ids):
            form = self._rows[int(sampled[index])].grammar
            # The echo ignores grammars, so a stop string ends its answer before the grammar is complete. With
            # tool calls, a text without calls is complete.
            is_cut = form is not None and form.kind != "tool_calls"
            stops.append((index, "cut" if is_cut else "string"))
        self._results.append(StepResult(token_ids, tuple(sorted(stops))))

    def collect(self):
        self._steps += 1
        if self._steps == self._fail_at:
            self._results.popleft()
            raise RuntimeError("the device fell over")
        return self._results.popleft()

    def discard(self):
        self._results.clear()

    def close(self):
        assert not self.attached


class NoBackend:
    """A grammar engine that accepts any text, since the executor ignores grammars."""

    shortest = 0

    def compile(self, grammar):
        return self

    def notes(self, grammar):
        return ()


@dataclass
class FakeBuilt:
    core: EngineCore
    executor: EchoExecutor
    config: EngineConfig
    processor: EchoProcessor = field(default_factory=EchoProcessor)
    spec: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(vocab_size=257, has_encoder=False, hidden_size=0)
    )
    grammars: Grammars = field(default_factory=lambda: Grammars(NoBackend(), deadline_s=1))
    device: str = "cpu"
    dtype: str = "float32"
    folder: Path = Path("fake")
    plugin: SimpleNamespace = field(default_factory=SimpleNamespace)
    closed: bool = False
    resumed: ResumeState | None = None
    store: None = None

    def close(self):
        self.closed = True
        self.core.close()


def builder(*, fail_at=None, log_options=None, processor=None, executor_class=EchoExecutor, **settings):
    """Return a replacement for mmengine.build.build. `settings` are fields of EngineConfig."""

    def build(model=None, *, config=None, log=None, resume=None, stop_watcher_factory=None, **kwargs):
        values = {"num_blocks": 200, "max_model_len": 400, "max_num_seqs": 4, "max_waiting": 50, **settings}
        values["max_model_len"] = min(values["max_model_len"], (values["num_blocks"] - 1) * 16)
        resolved = EngineConfig(eos_token_ids=(EOS,), **{"encoder_cache_size": 64, **values})
        executor = executor_class(stop_watcher_factory(EchoProcessor.tokenizer), fail_at)
        front = processor or EchoProcessor()
        if log is None:
            return FakeBuilt(EngineCore(resolved, executor), executor, resolved, front)
        opened = open_log(log, resume, resolved, **(log_options or {}))
        return FakeBuilt(
            opened.core(resolved, executor, {}), executor, resolved, front, resumed=opened.resumed
        )

    return build
