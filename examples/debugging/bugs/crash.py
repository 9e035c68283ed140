"""A planted bug: an IndexError if the chunk of the last row reaches an image."""

from mmengine.core.decide import running

_cut_at_media = running._cut_at_media


def cut_at_media(view, rows, wanted, media, draft):
    rows[media + 1]  # the bug: the row after the last does not exist
    return _cut_at_media(view, rows, wanted, media, draft)


running._cut_at_media = cut_at_media
