"""Fake FlashInfer wrappers in plain torch.

A fake accepts only calls with the recorded signatures. It computes attention only from the planned lists
(indptr, indices, last_page_len).
"""

import inspect
import json
from pathlib import Path
from types import SimpleNamespace

import torch

RECORD = Path(__file__).parent / "flashinfer_signatures.json"
METHODS = ("__init__", "plan", "run", "reset_workspace_buffer")
FUNCTIONS = ("rmsnorm", "fused_add_rmsnorm", "silu_and_mul")
WRAPPERS = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")


def signatures() -> dict[str, inspect.Signature]:
    """Return the recorded version's signatures, keyed by "class.method" or function name."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    return {name: _signature(parameters) for name, parameters in record["calls"].items()}


def _signature(parameters: list[list]) -> inspect.Signature:
    return inspect.Signature(
        [
            inspect.Parameter(name, getattr(inspect.Parameter, kind), **({} if needed else {"default": None}))
            for name, kind, needed in parameters
        ]
    )


def recorded(module) -> dict[str, list[list]]:
    """Return an installed package's signatures in the record's format. In the decode wrapper, `_plan_impl`
    declares the parameters for `plan`, so the record has `_plan_impl`'s signature.
    """
    calls = {}
    for wrapper in WRAPPERS:
        of = getattr(module, wrapper)
        for method in METHODS:
            function = getattr(of, "_plan_impl" if method == "plan" else method, None) or getattr(of, method)
            calls[f"{wrapper}.{method}"] = _recorded(function)
    return calls | {name: _recorded(getattr(module, name)) for name in FUNCTIONS}


def _recorded(function) -> list[list]:
    return [
        [name, str(one.kind.name), one.default is one.empty]
        for name, one in inspect.signature(function).parameters.items()
    ]


class FakeWrapper:
    """A fake for a wrapper in WRAPPERS. `log` records the constructor and each call of `plan` and `run`."""

    def __init__(self, name, log, calls, *arguments, **options):
        self._name, self._log, self._calls = name, log, calls
        self.options = self._bind("__init__", arguments, options)
        self._pin_memory_int_workspace_buffer = torch.zeros(0)
        self.int_workspace = None
        self.planned = None
        log.append(("made", self))

    def _bind(self, method, arguments, options):
        bound = self._calls[f"{self._name}.{method}"].bind(self, *arguments, **options)
        return {name: value for name, value in bound.arguments.items() if name != "self"}

    def reset_workspace_buffer(self, *arguments, **options):
        bound = self._bind("reset_workspace_buffer", arguments, options)
        self.int_workspace = bound["int_workspace_buffer"]
        self._pin_memory_int_workspace_buffer = torch.zeros(0)

    def plan(self, *arguments, **options):
        given = self._bind("plan", arguments, options)
        prefix = "paged_kv_" if "qo_indptr" in given else ""
        indptr, indices, last = (given[prefix + name] for name in ("indptr", "indices", "last_page_len"))
        queries = given.get("qo_indptr", torch.arange(len(last) + 1, dtype=torch.int32))
        assert all(each.dtype == torch.int32 for each in (indptr, indices, last, queries))
        assert indptr.device.type == "cpu" and last.device.type == "cpu"
        assert (last >= 1).all() and (last <= given["page_size"]).all()
        assert indptr[-1] == len(indices) and (indptr.diff() >= 1).all()
        columns = {"indptr": indptr, "indices": indices, "last_page_len": last}
        if self.options.get("use_cuda_graph"):
            ending = "_buf" if prefix else "_buffer"
            for name, column in columns.items():
                buffer = self.options[f"paged_kv_{name}{ending}"]
                if name != "indices":
                    assert len(buffer) == len(column), "a captured wrapper always has the same number of rows"
                buffer[: len(column)] = column
                columns[name] = buffer
            uniform = given.get("uniform_q_len")
            if uniform:
                assert (queries.diff() == uniform).all()
        self.planned = SimpleNamespace(queries=queries, given=given, **columns)
        self._log.append(("plan", self, self._pin_memory_int_workspace_buffer))

    def run(self, *arguments, **options):
        given = self._bind("run", arguments, options)
        q, (k_cache, v_cache), planned = given["q"], given["paged_kv_cache"], self.planned
        assert q.dtype == planned.given["q_data_type"] and k_cache.dtype == planned.given["kv_data_type"]
        assert k_cache.stride() == v_cache.stride()
        assert len(q) == planned.queries[-1]
        out = given["out"]
        assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
        size, causal = planned.given["page_size"], planned.given.get("causal", True)
        for row in range(len(planned.last_page_len)):
            first, end = planned.indptr[row : row + 2].tolist()
            pages = planned.indices[first:end].long()
            length = (end - first - 1) * size + int(planned.last_page_len[row])
            k, v = (cache[pages].flatten(0, 1)[:length].float() for cache in (k_cache, v_cache))
            place = slice(*planned.queries[row : row + 2].tolist())
            out[place] = attend(q[place].float(), k, v, causal).to(q.dtype)
        self._log.append(("run", self))
        return out


def attend(q, k, v, causal):
    """Compute attention. Like the kernel, multiply masked values by 0, so all values must be finite."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    if causal:
        seen = torch.arange(len(k)) <= torch.arange(len(k) - len(q), len(k))[:, None]
        scores = scores.masked_fill(~seen, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def fake_library(log=None):
    """Return a fake for the package flashinfer."""
    log, calls = [] if log is None else log, signatures()
    makers = {
        name: (lambda *a, _name=name, **o: FakeWrapper(_name, log, calls, *a, **o)) for name in WRAPPERS
    }
    return SimpleNamespace(log=log, **makers)
