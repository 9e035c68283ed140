"""The engine's settings that state a rule of the model. The engine fills them in when the model is known, and
STARTED records them, so decisions and replays need no model.
"""

from typing import Annotated

from mmengine.engine_settings import EngineSettings
from mmengine.setting_fields import described


class ModelSettings(EngineSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """EngineSettings and the model's rules."""

    atomic_runs: Annotated[
        bool,
        described(
            "Whether one step computes all tokens of an image, or of a video's frame; set by the model. An "
            "image with more tokens than a step is refused."
        ),
    ] = False
    whole_prompt: Annotated[
        bool,
        described(
            "Whether one step computes a request's whole prompt; set by the model. A prompt with more tokens "
            "than a step is refused."
        ),
    ] = False
