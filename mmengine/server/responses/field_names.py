"""Field names of /v1/responses that differ from chat's."""

from mmengine.errors import FieldPath
from mmengine.server.http.field_names import INDEX, FieldNames, Renames

RENAMES: Renames = (
    (("tool_choice", "allowed_tools", "tools", INDEX, "function"), ("tool_choice", "tools", INDEX)),
    (("tool_choice", "allowed_tools"), ("tool_choice",)),
    (("tool_choice", "function"), ("tool_choice",)),
    (("tools", INDEX, "function"), ("tools", INDEX)),
    (("response_format", "json_schema"), ("text", "format")),
    (("response_format",), ("text", "format")),
    (("max_completion_tokens",), ("max_output_tokens",)),
    (("messages",), ("input",)),
)


def upload_place(where: FieldPath, names: FieldNames) -> FieldPath:
    """Return the client's field for an uploaded image, which chat calls image_url."""
    path = names.path(where)
    return FieldPath(*path[:-1], "file_id") if path[-1] == "image_url" else path / "file_id"
