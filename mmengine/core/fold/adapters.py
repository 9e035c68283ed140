"""Applies events about LoRA adapters to the state.

The state maps names to adapters. An adapter becomes nameless when its name is removed or passes to another
adapter. The state keeps a nameless adapter until its last request has ended.
"""

from mmengine.core.state.request_state import RequestState
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev


def apply_loaded(state: State, event: ev.AdapterLoaded) -> None:
    pool = state.adapters
    before = pool.known.get(event.adapter.name)
    pool.known[event.adapter.name] = event
    pool.nameless.pop(event.adapter.digest, None)
    if before is not None:
        _drop_name(state, before)


def apply_unloaded(state: State, event: ev.AdapterUnloaded) -> None:
    before = state.adapters.known.pop(event.name, None)
    if before is not None:
        _drop_name(state, before)


def _drop_name(state: State, before: ev.AdapterLoaded) -> None:
    pool, digest = state.adapters, before.adapter.digest
    if _has_request(state, digest) and all(each.adapter.digest != digest for each in pool.known.values()):
        pool.nameless[digest] = before


def forget_adapter_of(state: State, req_state: RequestState) -> None:
    """Forget the request's adapter if the adapter is nameless and no other live request uses it."""
    nameless, adapter = state.adapters.nameless, req_state.request.adapter
    if nameless and adapter is not None and not _has_request(state, adapter.digest):
        nameless.pop(adapter.digest, None)


def _has_request(state: State, digest: bytes) -> bool:
    adapters = (req_state.request.adapter for req_state in state.requests.values())
    return any(adapter is not None and adapter.digest == digest for adapter in adapters)
