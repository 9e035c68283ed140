"""Events about LoRA adapters, a part of vocabulary.py."""

from mmengine.events.event_base import EventBase
from mmengine.request import Adapter


class AdapterLoaded(EventBase, frozen=True):
    """Observation: the adapter's name refers to this LoRA adapter from now on. `source`: its folder."""

    adapter: Adapter
    source: str = ""


class AdapterUnloaded(EventBase, frozen=True):
    """Observation: no new request can name this adapter. Requests that have the adapter continue with it."""

    name: str
