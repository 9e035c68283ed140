"""Images and videos that the encoder takes long for: what is said before it begins."""

from collections.abc import Iterator
from typing import NamedTuple

from mmengine.config import EngineConfig
from mmengine.core.state.view import View
from mmengine.encoder_cache.cache import encoder_key
from mmengine.encoder_cache.work import work_of
from mmengine.request import Request

LOWERED_BY = "max_pixels"  # the option of a request, and of `mmengine run`


class LargeMedia(NamedTuple):
    """`tokens`: of the prompt. `seconds`: that the encoder takes for it at the pace that was measured when
    the model was loaded, without what runs beside it."""

    modality: str
    tokens: int
    seconds: float

    def __str__(self) -> str:
        time = f"{self.seconds:.0f} seconds" if self.seconds < 90 else f"{self.seconds / 60:.0f} minutes"
        option = LOWERED_BY.replace("_", "-")
        return (
            f"the {self.modality} takes {self.tokens:,} tokens, and the encoder about {time}; "
            f"--{option} makes it smaller"
        )


def large_media(request: Request, config: EngineConfig, view: View) -> Iterator[LargeMedia]:
    """Items that are encoded over several steps, and that nobody had encoded before."""
    for item in request.media if config.encoder_piece else ():
        work = work_of(item.grid, config.encoder_even_patches)
        if work <= config.encoder_piece:
            continue
        if not view.encoder.has(encoder_key(item.mm_hash, request.cache_salt, request.visual_adapter)):
            yield LargeMedia(item.modality, item.num_embeds, work * config.encoder_work_ns / 1e9)
