"""Reads request files and formats answer lines. Each line is a JSON object.

The example lines are a request, an answer, and the answer to a failed request:

    {"custom_id": "a", "messages": […], "max_tokens": 64, "temperature": 0.7, "seed": 1, "n": 1, …}
    {"custom_id": "a", "text": "…", "token_ids": […], "finish_reason": "stop", "usage": {…}}
    {"custom_id": "b", "error": "…"}

`response_format` and `grammar` set a response format (docs/how-to/structured_output.md). If an answer with a
response format was truncated, `detail` says why.

If `n` is above 1, an answer has `choices` with index, text, token_ids and finish_reason. Messages have
OpenAI's format. Media paths are relative to the request file's folder and can name any file on the machine.
Check request files from untrusted sources before you run them.
"""

import codecs
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Protocol

from mmengine.errors import FIELD, LINES, FieldPath, InvalidRequest, MMEngineError
from mmengine.serve.batch.run_batch import AnsweredJob, Job
from mmengine.serve.prompt.options import LINE, MAX_ID_CHARS, make_options
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.prompt.request_lines import MAX_LINE_BYTES, custom_id_of, encode_line, parse_fields
from mmengine.serve.prompt.vllm_options import as_form
from mmengine.serve.text.request_output import Completion, require_success
from mmengine.serve.text.response_format import ResponseFormat

_CHUNK = 2**20
_OWN_FIELDS = ("custom_id", "messages")
OPENAIS_FORM = (
    "this is OpenAI's batch format, which mmengine serve --log accepts at /v1/batches; for run --batch, put "
    "the fields of body beside custom_id, and leave out method, url and model"
)


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """Selects every `count`-th non-blank line in a request file, beginning with line `index`."""

    index: int = 0
    count: int = 1

    def has(self, place: int) -> bool:
        return place % self.count == self.index

    def num_of(self, num_lines: int) -> int:
        return (num_lines + self.count - 1 - self.index) // self.count


WHOLE_FILE = Shard()


class RequestFile:
    """Iterates over a shard's lines as jobs. Yields the error for an invalid line.

    Indices count the shard's lines from 0. `answered`: the indices whose answers are already in the answer
    file. `media_options`: options that apply to the media in all prompts. `custom_ids`: each line's id, until
    `answer_line` takes the id.
    """

    def __init__(
        self,
        file: BinaryIO,
        base_folder: Path,
        answered: Set[int] = frozenset(),
        media_options: Mapping[str, object] | None = None,
        shard: Shard = WHOLE_FILE,
    ):
        self._shard = shard
        self._media_options = dict(media_options) if media_options is not None else None
        self._file = file
        self._answered = answered
        self._base_folder = base_folder
        self._seen: set[str] = set()
        self.custom_ids: dict[int, str | None] = {}

    def __iter__(self) -> Iterator[Job | MMEngineError | AnsweredJob]:
        for place, (number, line) in enumerate(numbered_lines(self._file)):
            custom_id, index = custom_id_of(line), place // self._shard.count
            if not self._shard.has(place):
                if custom_id is not None:
                    self._seen.add(custom_id)
                continue
            self.custom_ids[index] = custom_id
            try:
                job = self._job(index, line)
            except MMEngineError as error:
                done = index in self._answered
                yield AnsweredJob("", 1) if done else error.within(LINES, number)
            else:
                done = index in self._answered
                yield AnsweredJob(job[1].request_id, job[1].sampling.n) if done else job

    def _job(self, index: int, line: bytes | None) -> Job:
        custom_id = self.custom_ids[index]
        if custom_id in self._seen:
            raise InvalidRequest(f"the custom_id {custom_id!r} occurs in an earlier line: ids must differ")
        if custom_id is not None:
            self._seen.add(custom_id)
        fields = parse_fields(line)
        if custom_id is None:
            raise InvalidRequest(f"custom_id must be a string of 1 to {MAX_ID_CHARS} characters")
        if "messages" not in fields and {"body", "url"} & fields.keys():
            raise InvalidRequest(OPENAIS_FORM)
        if not isinstance(fields.get("messages"), list):
            raise InvalidRequest(
                f"{FIELD} must be a list of messages with role and content", path=FieldPath("messages")
            )
        keywords = {name: value for name, value in fields.items() if name not in _OWN_FIELDS}
        options = make_options(None, keywords, LINE)
        form = ResponseFormat.of(*as_form(fields))  # JSON fields never contain a Python type
        options = form.added_to(replace(options, request_id=custom_id))
        options.check()
        folder, media_options = self._base_folder, self._media_options
        return Prompt(fields["messages"], base_folder=folder, media_options=media_options), options

    def answer_line(self, index: int, answer: Completion | MMEngineError) -> bytes:
        """Return the answer line for request `index`, with a newline."""
        try:
            body: dict[str, object] = require_success(answer).as_json()
        except MMEngineError as error:
            body = {"error": str(error)}
            if error.path[:1] == (LINES,):
                body["line"] = error.path[1]
        return encode_line({"custom_id": self.custom_ids.pop(index), **body})


class LineSource(Protocol):
    """A binary file that can be read by line."""

    def readline(self, limit: int, /) -> bytes: ...


def numbered_lines(file: LineSource) -> Iterator[tuple[int, bytes | None]]:
    """Yield (number, line) for each non-blank line. Numbers count all lines in the file, from 1.

    Lines have no line end. A line that is too long is yielded as None, so that it takes no memory.
    """
    for number, line in enumerate(_bounded_lines(file), 1):
        if number == 1 and line is not None:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line is None or line.strip():
            yield number, line


def _bounded_lines(file: LineSource) -> Iterator[bytes | None]:
    while line := file.readline(MAX_LINE_BYTES + 1):
        if line.endswith(b"\n") or len(line) <= MAX_LINE_BYTES:
            yield line.removesuffix(b"\n")
            continue
        while (rest := file.readline(_CHUNK)) and not rest.endswith(b"\n"):
            pass
        yield None
