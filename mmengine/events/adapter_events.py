"""Events of LoRA adapters; vocabulary.py says what events are."""

from mmengine.events.event_base import EventBase
from mmengine.request import Adapter


class AdapterLoaded(EventBase, frozen=True):
    """Observation: a LoRA adapter, of the folder `source`, is what its name stands for from here on."""

    adapter: Adapter
    source: str = ""


class AdapterUnloaded(EventBase, frozen=True):
    """Observation: no adapter can be asked for by this name any more. Requests that have it go on with it."""

    name: str
