"""The reasons for refusing fetches, each with a text for the caller. The texts reveal nothing about the
network around this machine.
"""

from collections.abc import Iterable

from mmengine.errors import ErrorCode, InvalidMedia

# Reason -> text for the caller. An unknown name and a forbidden address have the same text. With different
# texts, a sender of URLs could find out which names and addresses exist.
_TEXTS = {
    "off": "URLs are not fetched here; send the data as a data: URL",
    "url": "it is not a valid URL; give one like https://host/picture.png",
    "userinfo": "a URL with a user name or a password is not accepted; remove them",
    "scheme": "only https: URLs are fetched here",
    "port": "its port is not allowed",
    "host": "its host is not allowed",
    "address": "its address is not allowed, or its host is unknown",
    "connect": "its host cannot be reached",
    "tls": "its host has no valid certificate for its name",
    "timeout": "it was not received in time",
    "protocol": "its host sent an invalid HTTP response, or closed the connection",
    "status": "its host did not return it",
    "redirects": "its host redirects too often",
    "encoding": "its host sent it compressed, which was not requested",
    "size": "it is too large",
    "total": "the request's media are too large together",
    "count": "the request names too many URLs and files",
    "type": "it is neither an image nor a video in a supported format",
    "file": "there is no such file below the media folder",
}
REASONS = (*_TEXTS, "given_up", "failed")


class FetchRefused(InvalidMedia):
    """A refused fetch. `reason`: a name in REASONS. `reason_text`: the message without the item's name."""

    code = ErrorCode.MEDIA_NOT_FETCHED

    def __init__(self, text: str, reason: str = "failed", reason_text: str = "") -> None:
        super().__init__(text)
        self.reason, self.reason_text = reason, reason_text or text

    def at(self, where: str, path: Iterable[str | int] = ()) -> "FetchRefused":
        """Return this error with the item's name and position added. `where`: the name, for the text. `path`:
        the position in the request.
        """
        found = FetchRefused(f"{where} is not fetched: {self.reason_text}", self.reason, self.reason_text)
        return found.located(path)


def refused(reason: str, detail: str = "") -> FetchRefused:
    """Return the error for a reason. `detail`: added to the text; may contain only limits and
    HTTP statuses.
    """
    return FetchRefused(_TEXTS[reason] + (f" ({detail})" if detail else ""), reason)
