"""Reports how a schema would be enforced, without a model (`check_schema`)."""

import random
import time
from collections.abc import Callable
from functools import partial
from statistics import mean
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from mmengine.errors import InvalidRequest
from mmengine.request import GrammarRequest
from mmengine.structured_output.deep_stack import call_deep
from mmengine.structured_output.json_schema.normalization import Bounds, normalize_schema
from mmengine.structured_output.json_schema.reading.loading import parse_schema
from mmengine.structured_output.json_schema.reading.reader import read_schema
from mmengine.structured_output.json_schema.vocabulary.notes import Note
from mmengine.structured_output.json_schema.vocabulary.refusal import SchemaRefused
from mmengine.structured_output.report.narrowing import bound_notes, format_notes
from mmengine.structured_output.request.strict_mode import strict_notes
from mmengine.structured_output.types.types import schema_of

if TYPE_CHECKING:  # Not imported at run time, because reporting a refused schema needs neither class.
    from mmengine.structured_output.engines.base import Backend
    from mmengine.structured_output.matcher import Matcher

MAX_DIGITS = 40  # The default value of EngineSettings.max_digits.
# Masks are timed along WALKS random answers with WALK_TOKENS tokens each.
WALKS, WALK_TOKENS = 3, 48
END = 256  # The end-of-sequence token in the byte tokenizer.


class MaskCost(msgspec.Struct, frozen=True):
    """The time to compute a row's mask in microseconds, measured at `count` positions in random answers."""

    count: int
    mean_us: float
    p99_us: float
    max_us: float


class SchemaReport(msgspec.Struct, frozen=True):
    """The result of `check_schema`.

    `verdict` is "exact" if answers can have exactly the values that the schema allows within the bounds. The
    verdict is "approximated" if some allowed values are excluded; `approximations` describes them. The
    verdict is "refused" if the schema cannot be enforced. For a refused schema, `keyword`, `pointer` and
    `why` give the cause, and `reason` is `why` without keyword and pointer. An answer never has a value that
    the schema forbids.

    `bounds` describes the values and key orders that only the bounds exclude. `notes` lists annotations that
    look like assertions, and other remarks.
    """

    verdict: Literal["exact", "approximated", "refused"]
    keyword: str = ""
    pointer: str = ""
    why: str = ""
    approximations: tuple[Note, ...] = ()
    bounds: tuple[Note, ...] = ()
    notes: tuple[Note, ...] = ()
    gate_ms: float = 0.0  # Time to normalize the schema.
    compile_ms: float = 0.0  # Compile time without masks.
    grammar_bytes: int = 0
    masks: MaskCost | None = None
    reason: str = ""


def check_schema(
    schema: object,
    *,
    bounds: Bounds | None = None,
    strict: bool = False,
    strict_keywords: bool = False,
    backend: "Backend | str | None" = None,
) -> SchemaReport:
    """Report whether `schema` can be enforced, and how exactly. No model is needed.

    `schema` is a JSON schema as a dict (or true, false) or as JSON text, or a type. `bounds` None means the
    default bounds; `Bounds.off()` means no bounds. `strict` adds notes on constructs that OpenAI's strict
    mode refuses. `strict_keywords` refuses keywords that no draft defines. `backend` is a backend or a
    backend's name (None: llguidance). With a backend, the grammar is compiled for the backend's tokenizer,
    and masks are timed. With a name, the grammar is compiled for a byte tokenizer, and no masks are timed. A
    refused schema raises no error. Raises ConfigError for an unknown backend name.
    """
    bounds = Bounds() if bounds is None else bounds
    backend = "llguidance" if backend is None else backend
    begun = time.perf_counter()
    try:
        given = schema if isinstance(schema, dict | bool | str | bytes) else schema_of(schema)
        gated = normalize_schema(given, bounds, strict_keywords=strict_keywords)
        gate_ms = (time.perf_counter() - begun) * 1e3
        document = read_schema(given)
        used = _byte_backend(backend) if isinstance(backend, str) else backend
        max_digits = MAX_DIGITS if bounds.max_digits is None else bounds.max_digits
        grammar = GrammarRequest("json_schema", gated.text, max_digits=max_digits)
        begun = time.perf_counter()
        compiled = call_deep(partial(used.compile, grammar))
        compile_ms = (time.perf_counter() - begun) * 1e3
    except SchemaRefused as error:
        return SchemaReport("refused", error.keyword, error.pointer, str(error), reason=error.why)
    except InvalidRequest as error:
        return SchemaReport("refused", "", "#", str(error), reason=str(error))
    narrowed = used.notes(msgspec.structs.replace(grammar, max_digits=0))
    limited = tuple(note for note in used.notes(grammar) if note not in narrowed)
    approximations = gated.narrow + narrowed + format_notes(document)
    return SchemaReport(
        "approximated" if approximations else "exact",
        approximations=approximations,
        bounds=gated.ordered + bound_notes(document, bounds) + limited,
        notes=gated.notes + (strict_notes(parse_schema(given)) if strict else ()),
        gate_ms=gate_ms,
        compile_ms=compile_ms,
        grammar_bytes=len(gated.text.encode()),
        masks=call_deep(partial(_masks, used, compiled.matcher)) if used is backend else None,
    )


def _byte_backend(name: str) -> "Backend":
    # Imported here, because importing a grammar engine is slow.
    from mmengine.structured_output.engines.backends import GRAMMAR_BACKENDS

    tokens = [*(bytes([byte]) for byte in range(END)), b""]
    make = GRAMMAR_BACKENDS.load(name)
    return make(lambda: tokens, lambda text: list(text.encode()), frozenset({END}), [END], END + 1)


def _masks(backend: "Backend", matcher: "Callable[[], Matcher]") -> MaskCost | None:
    """Return the time to compute masks in random answers.

    Answers are sampled uniformly from the allowed tokens.
    """
    bits = np.zeros((1, -(-backend.vocab_size // 32)), np.uint32)
    source, times = random.Random(0), list[float]()
    for _ in range(WALKS):
        each = matcher()
        for _ in range(WALK_TOKENS):
            bits[:] = 0
            begun = time.perf_counter()
            backend.fill([each], bits)
            times.append((time.perf_counter() - begun) * 1e6)
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8)[0], bitorder="little"))
            allowed = allowed[~np.isin(allowed, backend.eos_token_ids)]
            if not len(allowed):
                break
            backend.advance([each], [int(source.choice(allowed))])
    return MaskCost(len(times), mean(times), float(np.quantile(times, 0.99)), max(times)) if times else None
