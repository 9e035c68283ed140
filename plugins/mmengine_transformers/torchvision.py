"""Explains a failed import, most often of torchvision. Imports neither torch nor torchvision."""

from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec

from mmengine.errors import in_one_line

# Words in transformers' errors if torchvision is missing or was built for another torch.
_SIGNS = ("torchvision", "video_processor_mapping")


def import_reason(what: str, error: BaseException) -> str:
    """Return why `what` cannot be imported, and what to install."""
    texts = [str(each).lower() for each in _causes(error)]
    if not any(sign in text for text in texts for sign in _SIGNS):
        return f"{what} needs a package that is not installed: {in_one_line(list(_causes(error))[-1])}"
    # torchvision's operators fit a single build of torch. PyPI lacks the operators for torch without CUDA, so
    # torchvision must come from the index that torch came from.
    advice = f"install the torchvision that belongs to torch {version('torch')}, from the same index"
    if find_spec("torchvision") is None:
        return f"{what} needs torchvision, which is not installed; {advice}"
    return f"{what} needs torchvision, and the installed one does not fit torch; {advice}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
