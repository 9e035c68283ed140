"""Encodes the images and videos of chats as files in `data:` URLs, which a log can restore."""

import base64
import io
from fractions import Fraction

import av


def with_files(chat, fps=1.0):
    """Return a chat with its images and videos as files. `fps`: frames per second of the videos."""
    content = chat[0]["content"]
    if isinstance(content, str):
        return chat
    return [{"role": "user", "content": [_file(part, fps) for part in content]}]


def _file(part, fps):
    if part["type"] == "image":
        file = io.BytesIO()
        part["image"].save(file, "PNG")
        return {"type": "image_url", "image_url": {"url": _url("image/png", file)}}
    return {**part, "video": video_url(part["video"], fps)} if part["type"] == "video" else part


def video_url(frames, fps):
    """Return the URL of a video file that stores the frames' exact pixels."""
    file = io.BytesIO()
    with av.open(file, "w", format="mov") as container:
        stream = container.add_stream("png", rate=Fraction(fps))
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "rgb24"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")))
        container.mux(stream.encode(None))
    return _url("video/quicktime", file)


def _url(kind, file):
    return f"data:{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
