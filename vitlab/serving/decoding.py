"""From untrusted bytes to the model's pixels, in processes with limits on time and memory.

There are two pools of processes. An image whose header shows that it is cheap goes to the quick one. One that is large,
or of a format whose header does not show its cost, goes to the slow one: fewer processes, at a lower priority, with a
short queue; so whatever is sent there, ordinary photos do not wait for it.
"""

import asyncio
import math
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from vitlab.data.decoder import DecodeError
from vitlab.data.headers import ImpossibleHeader, read_header
from vitlab.data.images import PLAIN_WORK
from vitlab.data.sandbox import Budget, DecodeRequest, Sandbox
from vitlab.data.transforms import to_pixels
from vitlab.models.config import Preprocess, Size
from vitlab.serving.limits import Limits, RequestError, short_number, try_again
from vitlab.serving.uploads import Upload
from vitlab.text import listed

LARGE = 1 / 3  # of the limit on pixels: from here on an image goes to the slow pool
SLOW_QUEUE = 8  # images in the slow pool, waiting ones included
SLOW_NICENESS = 10  # added to the niceness of the slow pool's processes


class Decoders:
    """Both pools; they turn uploads into pixels cropped for the model, (3, h, w), uint8."""

    def __init__(self, size: Size, preprocess: Preprocess, limits: Limits, processes: int) -> None:
        self.limits = limits
        wanted = DecodeRequest(limits.formats, limits.max_pixels, size, preprocess)
        budget = Budget(limits.decode_seconds, 3.0 * limits.decode_seconds)
        self.quick = DecoderPool(processes, budget, wanted)
        self.slow = DecoderPool(max(1, processes // 2), budget, wanted, nice=SLOW_NICENESS, queue=SLOW_QUEUE)

    def start(self) -> None:
        """Start the processes, so that the first client does not wait for them."""
        self.quick.start()
        self.slow.start()

    async def decode(self, uploads: Sequence[Upload]) -> list[Tensor]:
        """Decode all of a request's images; the first error is raised and ends the work on the others."""
        if len(uploads) == 1:  # most requests: no task of its own
            return [await self._decode_one(uploads[0])]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._decode_one(upload)) for upload in uploads]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _decode_one(self, upload: Upload) -> Tensor:
        try:
            header = read_header(upload.data)
            if header and header.pixels > self.limits.max_pixels:
                raise DecodeError("large", f"{header.width} x {header.height} pixels")
            cheap = header and header.pixels <= LARGE * self.limits.max_pixels and header.work <= PLAIN_WORK
            return await (self.quick if cheap else self.slow).decode(upload)
        except ImpossibleHeader as absurd:
            raise RequestError(422, f"'{upload.name}' is broken: {absurd}") from None
        except DecodeError as bad:
            raise self._request_error(upload, bad) from None

    def _request_error(self, upload: Upload, bad: DecodeError) -> RequestError:
        if bad.fault == "large":
            allowed = short_number(self.limits.max_pixels).rstrip()
            return RequestError(413, f"'{upload.name}' has {bad.why}, and {allowed} are allowed; send it smaller")
        if bad.fault == "unknown":
            hint = format_hint(upload.data, self.limits.formats)
            return RequestError(422, f"'{upload.name}' is not an image in a supported format{hint}")
        return RequestError(422, f"'{upload.name}' is broken: {bad.why}")

    def close(self) -> None:
        self.quick.close()
        self.slow.close()


class DecoderPool:
    """Some processes with one queue, and a thread for each process that waits for its result."""

    def __init__(
        self, processes: int, budget: Budget, wanted: DecodeRequest, nice: int = 0, queue: float = math.inf
    ) -> None:
        self.wanted, self.queue, self.active = wanted, queue, 0
        self.sandboxes = [Sandbox(budget, nice=nice) for _ in range(processes)]
        self.free = deque(self.sandboxes)  # never empty when a thread needs one: there are as many
        self.threads = ThreadPoolExecutor(processes, "decode")

    def start(self) -> None:
        for sandbox in self.sandboxes:
            sandbox.start()

    async def decode(self, upload: Upload) -> Tensor:
        """Decode one image; cancelling this ends the process that works on it."""
        if self.active >= self.queue:
            raise try_again("too many large or unusual images are being read; try again in a moment", 429)
        job = DecodeJob(upload)
        self.active += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.threads, self._run, job)
        except asyncio.CancelledError:
            job.cancel()
            raise
        finally:
            self.active -= 1

    def _run(self, job: "DecodeJob") -> Tensor:
        sandbox = self.free.popleft()
        try:
            job.assign(sandbox)
            return to_pixels(sandbox.decode(job.upload.data, self.wanted))
        finally:
            job.assign(None)
            self.free.append(sandbox)

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        for sandbox in self.sandboxes:
            sandbox.kill(close=True)


class DecodeJob:
    """An image that is being decoded; cancelling it, from another thread, kills the process that works on it."""

    def __init__(self, upload: Upload) -> None:
        self.upload = upload
        self.sandbox: Sandbox | None = None
        self.cancelled = False
        self.lock = threading.Lock()

    def assign(self, sandbox: Sandbox | None) -> None:
        """Set the process that works on it, None when it has finished; raises DecodeError if the job was cancelled."""
        with self.lock:
            if self.cancelled and sandbox is not None:
                raise DecodeError("broken", "decoding it was stopped")
            self.sandbox = sandbox

    def cancel(self) -> None:
        with self.lock:
            self.cancelled = True
            if self.sandbox is not None:
                self.sandbox.kill()


def format_hint(data: bytes | bytearray, formats: Sequence[str]) -> str:
    """What to send instead, with the most common mistakes named."""
    start = bytes(data[:512])
    if start.lstrip().lower().startswith((b"<svg", b"<?xml", b"<!doctype")):
        return ": it is text such as SVG or HTML; send a JPEG or PNG"
    if start[4:8] == b"ftyp" and start[8:12] in (b"heic", b"heix", b"mif1", b"hevc"):
        return ": it is HEIC; send it as JPEG"
    return f"; send {listed(formats)}"
