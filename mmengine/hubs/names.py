"""Parses the hub model names that users give: owner/name, with an optional hub prefix, tag and revision."""

import os
import re
from typing import NamedTuple

from mmengine.errors import ModelError

HUB_VARIABLE = "MMENGINE_HUB"  # Environment variable with the hub for names without a hub prefix.
HUGGING_FACE, MODELSCOPE = "hf", "modelscope"
TITLES = {HUGGING_FACE: "Hugging Face", MODELSCOPE: "ModelScope"}
_NAME = re.compile(
    r"((?P<hub>hf|modelscope):|(?P<site>(https://)?(hf|huggingface)\.co/(?=[^/]+/)))?"
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}(/[\w.-]{1,96}(:(?P<tag>[\w.-]{1,64}))?)?)(@(?P<revision>.*))?"
)
_REVISION = re.compile(r"[A-Za-z0-9][\w.-]{0,127}(/[\w.-]{1,127}){0,7}")


class HubName(NamedTuple):
    """A model's name at a hub.

    `revision`: a branch, a tag or a commit; None: the hub's main branch. `tag`: a name such as Q4_K_M that
    picks a GGUF file; None: the safetensors files, or the default GGUF file of a model that has only GGUF
    files.
    """

    hub: str  # A key in TITLES.
    repo: str
    revision: str | None = None
    tag: str | None = None

    def __str__(self) -> str:
        name = self.repo if self.tag is None else f"{self.repo}:{self.tag}"
        return name if self.revision is None else f"{name}@{self.revision}"


def parse_name(text: str) -> HubName | None:
    """Parse [hf:|modelscope:|hf.co/]owner/name[:tag][@revision]; return None for any other text.

    Raises ModelError for an invalid revision, and for an unknown hub in the variable MMENGINE_HUB.
    """
    found = _NAME.fullmatch(text)
    if found is None or ".." in found["repo"]:
        return None
    revision = found["revision"]
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise ModelError(
            f"{revision[:100]!r} is not a valid revision; after @ give a branch, a tag or a commit of "
            f"{found['repo']}"
        )
    hub = (
        found["hub"]
        or (found["site"] and HUGGING_FACE)
        or os.environ.get(HUB_VARIABLE, "").strip().lower()
        or HUGGING_FACE
    )
    if hub not in TITLES:
        raise ModelError(f"{HUB_VARIABLE} is {hub[:100]!r}; set it to {' or '.join(TITLES)}")
    tag = found["tag"]
    return HubName(hub, found["repo"].removesuffix(f":{tag}"), revision, tag)
