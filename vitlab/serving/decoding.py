"""From bytes that anyone may have sent to the model's pixels, in processes with limits on time and memory.

There are two lanes. What is known to be cheap from its header takes the quick one. What is large, or of a kind whose
cost its header does not show, takes the slow one: fewer processes, at a lower priority, with a short line; so
whatever is sent there, ordinary photos pass by it.
"""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from torch import Tensor

from vitlab.data.decoder import Undecodable
from vitlab.data.headers import Absurd, Header, read_header
from vitlab.data.images import PLAIN_WORK
from vitlab.data.sandbox import Budget, Sandbox, Wanted
from vitlab.data.transforms import to_pixels
from vitlab.models.config import Preprocess, Size
from vitlab.serving.limits import RETRY, Limits, Refused, short
from vitlab.serving.uploads import Upload

LARGE = 1 / 3  # of the limit on pixels: from here on a picture takes the slow lane
LINE = 8  # pictures in the slow lane, waiting ones included
LOWER = 10  # what is added to the niceness of the slow lane's processes


class Decoders:
    """Processes that turn uploads into pixels framed for the model, (3, h, w), uint8."""

    def __init__(self, size: Size, preprocess: Preprocess, limits: Limits, processes: int) -> None:
        self.limits = limits
        wanted = Wanted(limits.formats, limits.max_pixels, size, preprocess)
        budget = Budget(limits.decode_seconds, 3.0 * limits.decode_seconds)
        self.quick = Lane(processes, budget, wanted)
        self.slow = Lane(max(1, processes // 2), budget, wanted, nice=LOWER, line=LINE)

    def start(self) -> None:
        """So that the first client does not pay for it."""
        self.quick.start()
        self.slow.start()

    async def pixels(self, uploads: Sequence[Upload]) -> list[Tensor]:
        """All of a request's pictures; the first that is refused refuses the request and ends the others' work."""
        if len(uploads) == 1:
            return [await self._one(uploads[0])]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(upload)) for upload in uploads]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _one(self, upload: Upload) -> Tensor:
        try:
            header = read_header(upload.data)
            if header is not None and header.pixels > self.limits.max_pixels:
                raise Undecodable("large", f"{header.width} x {header.height} pixels")
            lane = self.quick if self._is_cheap(header) else self.slow
            return await lane.decode(upload)
        except Absurd as absurd:
            raise Refused(422, f"'{upload.name}' is broken: {absurd}") from None
        except Undecodable as bad:
            raise self._refusal(upload, bad) from None

    def _is_cheap(self, header: Header | None) -> bool:
        if header is None:
            return False
        return header.pixels <= LARGE * self.limits.max_pixels and header.work <= PLAIN_WORK

    def _refusal(self, upload: Upload, bad: Undecodable) -> Refused:
        if bad.fault == "large":
            allowed = short(self.limits.max_pixels).rstrip()
            return Refused(413, f"'{upload.name}' has {bad.why}, and {allowed} are allowed; send it smaller")
        if bad.fault == "unknown":
            hint = advice(upload.data, self.limits.formats)
            return Refused(422, f"'{upload.name}' is not a picture of a kind that is read here{hint}")
        return Refused(422, f"'{upload.name}' is broken: {bad.why}")

    def close(self) -> None:
        self.quick.close()
        self.slow.close()


class Lane:
    """Some processes with one line before them, and a thread for each that waits for it."""

    def __init__(self, processes: int, budget: Budget, wanted: Wanted, *, nice: int = 0, line: int | None = None):
        self.wanted, self.line, self.busy = wanted, line, 0
        self.boxes = [Sandbox(budget, nice=nice) for _ in range(processes)]
        self.free: SimpleQueue[Sandbox] = SimpleQueue()
        for box in self.boxes:
            self.free.put(box)
        self.threads = ThreadPoolExecutor(processes, "decode")

    def start(self) -> None:
        for box in self.boxes:
            box.start()

    async def decode(self, upload: Upload) -> Tensor:
        """Cancelling it ends the work, too."""
        if self.line is not None and self.busy >= self.line:
            raise Refused(429, "too many large or unusual pictures are being read; try again in a moment", RETRY)
        job = Job(upload)
        self.busy += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.threads, self._work, job)
        except asyncio.CancelledError:
            job.cancel()
            raise
        finally:
            self.busy -= 1

    def _work(self, job: "Job") -> Tensor:
        box = self.free.get()
        try:
            job.begin(box)
            return to_pixels(box.decode(job.upload.data, self.wanted))
        finally:
            job.end()
            self.free.put(box)

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        for box in self.boxes:
            box.kill(close=True)


class Job:
    """A picture on its way; the process that is busy with it dies when nobody waits for it any more."""

    def __init__(self, upload: Upload) -> None:
        self.upload = upload
        self.box: Sandbox | None = None
        self.cancelled = False
        self.lock = threading.Lock()

    def begin(self, box: Sandbox) -> None:
        with self.lock:
            if self.cancelled:
                raise Undecodable("broken", "decoding it was stopped")
            self.box = box

    def end(self) -> None:
        with self.lock:
            self.box = None

    def cancel(self) -> None:
        with self.lock:
            self.cancelled = True
            if self.box is not None:
                self.box.kill()


def advice(data: bytes | bytearray, formats: Sequence[str]) -> str:
    """A word for what people send most often by mistake."""
    start = bytes(data[:512])
    if start.lstrip().lower().startswith((b"<svg", b"<?xml", b"<!doctype")):
        return ": it is text such as SVG or HTML; send a JPEG or PNG"
    if start[4:8] == b"ftyp" and start[8:12] in (b"heic", b"heix", b"mif1", b"hevc"):
        return ": it is HEIC; send it as JPEG"
    return f"; send {', '.join(formats[:-1])} or {formats[-1]}"
