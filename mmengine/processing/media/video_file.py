"""Reads the frames of a video file with PyAV.

Packets are counted first; then only the needed frames are decoded.

PyAV gets a byte stream, and only common containers are allowed, so that a crafted playlist cannot make FFmpeg
open other files or addresses.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from mmengine.errors import InvalidMedia
from mmengine.processing.media.formats import container_format
from mmengine.processing.media.sources import MAX_VIDEO_BYTES, Access, open_source
from mmengine.processing.media.video_header import frame_rate, shown

if TYPE_CHECKING:  # Imported when needed, because images do not need FFmpeg.
    from av.container import InputContainer
    from av.packet import Packet

_OTHERS = "mpeg,mpegts"  # Allowed formats that `container_format` does not recognise.
# Limit the time that a crafted file can cost: ignore an AVI's OpenDML index and all chapters, and limit
# FFmpeg's own index to 128 KiB for each stream.
_OPTIONS = {"use_odml": "0", "ignore_chapters": "1", "indexmem": str(2**17)}
MAX_SAMPLES = 2**22  # Maximum number of packets in all streams; ten hours with sound have three million.
MAX_PACKETS = 2**20  # Maximum packets in the video stream: nearly ten hours at 30 frames per second.
MAX_FRAME_PIXELS = 2**25  # Maximum size of a frame: 7680 x 4320.
MAX_DECODED_FRAMES = 2**15  # Maximum number of decoded frames per request, including skipped frames.
MAX_DECODED_PIXELS = 2**36  # Maximum number of decoded pixels: MAX_DECODED_FRAMES frames at 1920 x 1080.
MAX_GIF_PIXELS = 2**32  # Maximum number of pixels decoded from a GIF per request.
# Maximum number of keyframes with an earlier time than the preceding keyframe in the file. Sorting many
# such keyframes into FFmpeg's index would take long.
MAX_BACKWARD = 1024


def _titles(av: ModuleType) -> dict[str, Any]:
    """Return the PyAV option that tolerates invalid bytes in metadata such as titles. PyAV 19 and later need
    no option.
    """
    return {} if int(av.__version__.partition(".")[0]) >= 19 else {"metadata_errors": "replace"}


class VideoFile:
    """Implements the protocol Clip (video.py) for a file. Not shared between threads. Close it after use."""

    def __init__(self, source: Any, access: Access, where: str) -> None:
        self.where = where
        self._file = open_source(source, access, MAX_VIDEO_BYTES, where)
        self._container: InputContainer | None = None
        self._decoded = self._decoded_pixels = 0
        try:
            self._format = container_format(self._file)
            self._open()
            self._scan()
            self._open()
            first = next(self._decode(), None)
            if first is None:
                raise InvalidMedia(f"{where} has no frame that can be decoded")
            self.size = self._pixels(first).shape[:2]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._container is not None:
            self._container.close()
        self._file.close()

    def _open(self) -> None:
        """Open the container, or reopen it, at the first packet."""
        import av  # Heavy, and only needed for video files.

        if self._container is not None:
            self._container.close()
            self._container = None
        self._file.seek(0)
        try:
            self._container = container = av.open(
                self._file,
                "r",
                format=self._format,
                options={**_OPTIONS, "format_whitelist": self._format or _OTHERS},
                **_titles(av),
            )
        except (av.FFmpegError, ValueError):
            raise InvalidMedia(
                f"{self.where} is damaged or has an unsupported format; MP4, MOV, WebM, MKV, AVI, MPEG and "
                "GIF are supported"
            ) from None
        if not container.streams.video:
            raise InvalidMedia(f"{self.where} holds no video, only other streams")
        self._stream = container.streams.video[0]
        context = self._stream.codec_context
        if context is None:
            raise InvalidMedia(f"{self.where} has an unsupported codec; convert it to H.264 in an MP4")
        if context.width * context.height > MAX_FRAME_PIXELS:
            raise InvalidMedia(
                f"{self.where} has frames of {context.width} x {context.height} pixels, more than "
                f"{MAX_FRAME_PIXELS} allowed"
            )

    @property
    def _opened(self) -> "InputContainer":
        assert self._container is not None  # The caller has called `_open`.
        return self._container

    def _scan(self) -> None:
        """Count frames and record their times, without decoding."""
        import av

        times: list[int] = []
        keys: list[int] = []
        packets = num_frames = 0
        order = _Order(self.where)
        try:
            for packet in self._opened.demux():
                if packet.size == 0:
                    continue
                order.check(packet)
                if packet.stream_index != self._stream.index:
                    continue
                packets += 1
                if packets > MAX_PACKETS:
                    raise InvalidMedia(f"{self.where} has more than {MAX_PACKETS} frames; cut it shorter")
                if not packet.is_discard:
                    num_frames += 1
                    if packet.pts is not None:
                        times.append(packet.pts)
                if packet.is_keyframe and packet.pts is not None:
                    keys.append(packet.pts)
        except av.FFmpegError:
            raise self._damaged() from None
        if not num_frames:
            raise InvalidMedia(f"{self.where} has no frames")
        # The header states how many frames the complete file has. A tolerance is needed, because edit lists
        # in the file may hide a few frames.
        if packets < 0.9 * self._stream.frames:
            raise InvalidMedia(
                f"{self.where} is cut short: {packets} of its {self._stream.frames} frames are there"
            )
        self.num_frames = num_frames
        # Some containers store no times. Their frames are found by counting.
        self._times = sorted(times) if len(times) == num_frames else None
        self._keys = sorted(keys)
        rate = self._stream.average_rate or self._stream.guessed_rate
        self.fps = frame_rate(self._seconds(), num_frames, float(rate) if rate else 0.0)

    def _seconds(self) -> float:
        """Return the time from the first frame to the last, or 0 if the container stores no times."""
        base = self._stream.time_base
        return (
            0.0 if self._times is None or base is None else float((self._times[-1] - self._times[0]) * base)
        )

    def frames(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield one frame, uint8 [h, w, 3], per index. The indices must ascend."""
        self._open()
        reader = self._by_count(indices) if self._times is None else self._by_time(indices, self._times)
        for frame in reader:
            yield self._pixels(frame)

    def _by_count(self, indices: Sequence[int]) -> Iterator[Any]:
        decoder, position, frame = self._decode(), -1, None
        for index in indices:
            while position < index and (following := next(decoder, None)) is not None:
                frame, position = following, position + 1
            if frame is None:
                raise self._damaged()
            yield frame  # If the decoder has ended, the last frame replaces the missing frames.

    def _by_time(self, indices: Sequence[int], times: list[int]) -> Iterator[Any]:
        decoder, frame, seeks = self._decode(), None, True
        for index in indices:
            target = times[index]
            place = bisect_right(self._keys, target) - 1
            reached = times[0] if frame is None or frame.pts is None else frame.pts
            if seeks and place >= 0 and self._keys[place] > reached:
                decoder = self._seek(self._keys[place])
                frame = next(decoder, None)
                if frame is None or frame.pts is None or frame.pts > target:
                    # The index of the container is wrong: decode from the beginning without seeking.
                    self._open()
                    decoder, frame, seeks = self._decode(), None, False
            while frame is None or frame.pts is None or frame.pts < target:
                following = next(decoder, None)
                if following is None:
                    break
                frame = following
            if frame is None:
                raise self._damaged()
            yield frame

    def _seek(self, time: int) -> Iterator[Any]:
        """Return an iterator over the frames from the keyframe at `time` on. If seeking fails, the iterator
        is empty.
        """
        import av

        try:
            self._opened.seek(time, stream=self._stream)
        except av.FFmpegError:
            return iter(())
        return self._decode()

    def _decode(self) -> Iterator[Any]:
        import av

        try:
            for frame in self._opened.decode(self._stream):
                self._decoded += 1
                self._decoded_pixels += frame.width * frame.height
                self._check_decoded()
                yield frame
        except av.FFmpegError:
            raise self._damaged() from None

    def _check_decoded(self) -> None:
        """Raise InvalidMedia if more was decoded than the limits allow. A GIF has a lower pixel limit,
        because a few bytes may draw a whole frame.
        """
        most = MAX_GIF_PIXELS if self._format == "gif" else MAX_DECODED_PIXELS
        if self._decoded > MAX_DECODED_FRAMES or self._decoded_pixels > most:
            too_many = f"{most} pixels" if self._decoded_pixels > most else f"{MAX_DECODED_FRAMES} frames"
            raise InvalidMedia(
                f"{self.where}: more than {too_many} would have to be decoded; use video_start and "
                "video_end, or a file with more keyframes"
            )

    def _pixels(self, frame: Any) -> np.ndarray:
        if frame.width * frame.height > MAX_FRAME_PIXELS:
            raise InvalidMedia(
                f"{self.where} has a frame of {frame.width} x {frame.height} pixels, which is too large"
            )
        import av

        try:
            pixels = frame.to_ndarray(format="rgb24")
        except (av.FFmpegError, ValueError):  # The pixel format cannot be converted.
            raise self._damaged() from None
        return shown(pixels, frame)

    def _damaged(self) -> InvalidMedia:
        return InvalidMedia(f"{self.where} is damaged: its frames cannot be decoded")


class _Order:
    """Counts the packets in all streams, and the keyframes whose time is before the preceding keyframe's
    time.
    """

    def __init__(self, where: str) -> None:
        self._where, self._packets, self._backward = where, 0, 0
        self._last: dict[int, int] = {}

    def check(self, packet: "Packet") -> None:
        """Count a packet. Raises InvalidMedia beyond a limit."""
        self._packets += 1
        if packet.is_keyframe and packet.pts is not None:
            self._backward += packet.pts < self._last.get(packet.stream_index, packet.pts)
            self._last[packet.stream_index] = packet.pts
        if self._packets > MAX_SAMPLES or self._backward > MAX_BACKWARD:
            raise InvalidMedia(
                f"{self._where} has more than {MAX_SAMPLES} packets, or more than {MAX_BACKWARD} keyframes "
                "with an earlier time than the preceding keyframe; cut the video, or encode it again"
            )
