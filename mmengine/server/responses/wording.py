"""The words of a body of /v1/responses, where chat has others."""

import re

from mmengine.server.http.wording import Wording

WORDS = (
    (re.compile(r"\btool_choice\.allowed_tools\b"), "tool_choice"),
    (re.compile(r"\b(tools\[\d+\]|tool_choice(?:\.tools\[\d+\])?)\.function\b"), r"\1"),
    (re.compile(r"\bresponse_format\.json_schema\b"), "text.format"),
    (re.compile(r"\bresponse_format\b"), "text.format"),
    (re.compile(r"\bmax_completion_tokens\b"), "max_output_tokens"),
    (re.compile(r"\bmessages\b"), "input"),
)


def upload_place(where: str, wording: Wording) -> str:
    """The field that names an uploaded image, of which chat says that it is its image_url."""
    return f"{wording.text(where).removesuffix('image_url')}file_id"
