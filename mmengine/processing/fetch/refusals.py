"""Reasons why media were not fetched, in texts that reveal nothing about the network around this machine."""

from collections.abc import Iterable

from mmengine.errors import ErrorCode, InvalidMedia

# Texts for the caller, by reason. Before a connection, all problems with names and addresses have the same
# text: otherwise a sender of URLs could find out which names and addresses exist.
_SAID = {
    "off": "URLs are not fetched here; send the data as a data: URL",
    "url": "it is no URL that can be used; give one like https://host/picture.png",
    "userinfo": "a URL with a user name or a password is not taken; leave it out",
    "scheme": "only https: is fetched here",
    "port": "its port is not allowed",
    "host": "its host is not one of those that are allowed",
    "address": "the address is not allowed, or its host is not known",
    "connect": "its host cannot be reached",
    "tls": "its host has no certificate that is valid for its name",
    "timeout": "it did not come in time",
    "protocol": "its host did not answer as HTTP asks for, or broke off",
    "status": "its host answered without it",
    "redirects": "its host redirects too often",
    "encoding": "its host sends it compressed, although it was not asked to",
    "size": "it is too large",
    "total": "the media of its request are too large together",
    "count": "the request names too many URLs and files of media",
    "type": "it is neither an image nor a video of a kind that is read here",
    "file": "there is no such file below the folder that files are read from",
}
REASONS = (*_SAID, "given_up", "failed")


class FetchRefused(InvalidMedia):
    """A fetch that was refused. `reason`: a name in REASONS. `said`: the message without the item's name."""

    code = ErrorCode.MEDIA_NOT_FETCHED

    def __init__(self, text: str, reason: str = "failed", said: str = "") -> None:
        super().__init__(text)
        self.reason, self.said = reason, said or text

    def at(self, where: str, path: Iterable[str | int] = ()) -> "FetchRefused":
        """Return the same error for the media that texts name `where`, at `path`."""
        found = FetchRefused(f"{where} is not fetched: {self.said}", self.reason, self.said)
        return found.located(path)


def refused(reason: str, detail: str = "") -> FetchRefused:
    """Return the error for a reason. `detail`: more for the caller, only about limits and statuses."""
    return FetchRefused(_SAID[reason] + (f" ({detail})" if detail else ""), reason)
