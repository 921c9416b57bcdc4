"""A model with its queue, its decoders and its metrics: what the routes call."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from fastapi import Request
from torch import Tensor

from vitlab.data.samples import Sample
from vitlab.errors import UserError
from vitlab.inference.engine import buckets
from vitlab.prediction import Classifier
from vitlab.prediction.classifier import Scores
from vitlab.serving.batcher import Batcher, BatcherClosed, QueueFull
from vitlab.serving.corrections import Corrections
from vitlab.serving.decoding import Decoders
from vitlab.serving.explain import compute_map, explain, map_to_json, steps_to_json
from vitlab.serving.garbage import keep_all
from vitlab.serving.limits import Limits, MemoryBudget, RequestError, try_again
from vitlab.serving.metrics import Metrics
from vitlab.serving.report import Report
from vitlab.serving.uploads import ClientDisconnected, Upload, receive_uploads

Result = TypeVar("Result")
MAX_BODIES = 25  # of the largest size in memory at one time: by default half a gigabyte
LAST_BATCH_SECONDS = 5.0  # for the batch that is running when all requests have ended


@dataclass(frozen=True)
class ServiceSettings:
    """How the server runs."""

    name: str = "model"
    token: str | None = None
    max_batch: int | None = None  # 256, and 16 on a CPU, where larger batches add latency and no throughput
    max_wait: float = 0.005  # seconds
    queue: int | None = None  # four batches on a GPU: two that it computes, two that wait; 256 on a CPU
    processes: int | None = None  # that decode; as many as cores, up to 8
    limits: Limits = field(default_factory=Limits)
    samples: Sequence[Sample] = ()  # that the page offers
    report: Report | None = None
    corrections: Path | None = None  # the folder for photos with the right class


class Service:
    """Answers requests; there is one for each server."""

    def __init__(self, classifier: Classifier, settings: ServiceSettings) -> None:
        self.classifier, self.settings, self.limits = classifier, settings, settings.limits
        classifier.model.requires_grad_(False)  # maps need gradients of activations, not of weights
        on_cpu = classifier.device.type == "cpu"
        images, queue = self.limits.max_images, settings.queue or (256 if on_cpu else 1024)
        if images > queue:
            raise UserError(f"a request of {images} images can never fit a queue of {queue}; make --queue larger")
        if (folder := settings.corrections) is not None and classifier.thresholds is not None:
            raise UserError("--corrections stores a photo under one class, and this model is multi-label; leave it out")
        self.corrections = None if folder is None else Corrections(folder, classifier.labels)
        self.metrics = Metrics()
        self.budget = MemoryBudget(MAX_BODIES * self.limits.max_bytes)
        processes = settings.processes or min(8, os.cpu_count() or 1)
        self.decoders = Decoders(classifier.model.config.image_size, classifier.preprocess, self.limits, processes)
        max_batch = settings.max_batch or (16 if on_cpu else 256)
        self.batcher = Batcher(self._run_batch, max_batch, settings.max_wait, queue, self.metrics.count_batch)
        self.draining = False
        self.metrics.add_gauge("vitlab_queue_length", "Images in the queue.", lambda: len(self.batcher))
        self.metrics.add_gauge("vitlab_upload_bytes", "Bytes of uploads in memory.", lambda: self.budget.used)

    def _run_batch(self, pixels: Sequence[Tensor]) -> Callable[[], Sequence[Scores]]:
        """On the model's thread; what is returned is called on another one, while this one starts the next batch."""
        scores = self.classifier.start(pixels)
        return lambda: scores().each()

    async def warm_up(self) -> None:
        """Run one request of each kind, so that the first client does not wait for what torch sets up."""
        await asyncio.to_thread(self.decoders.start)
        blank = torch.zeros(3, *self.classifier.model.config.image_size, dtype=torch.uint8)
        await asyncio.wrap_future(self.batcher.submit(blank))
        await asyncio.wrap_future(self.batcher.call(lambda: explain(self.classifier, blank)))
        sizes = buckets(self.batcher.max_batch)
        await asyncio.to_thread(self.classifier.engine.warm_up, sizes, keep_all)  # after all these

    async def predict(self, request: Request) -> list[tuple[str, Scores]]:
        """Every image's name and scores."""
        names, futures = await self._enqueue(request)
        return list(zip(names, await gather_results(request, futures), strict=True))

    async def _enqueue(self, request: Request) -> tuple[list[str], list[Future[Scores]]]:
        """Read and decode the body and queue its images; when this returns nothing refers to the body any more."""
        self.check_capacity()
        async with receive_uploads(request, self.limits, self.budget) as uploads:
            with batcher_errors(), self.batcher.reserve(len(uploads)) as places:
                futures = places.submit(await run_while_connected(request, self.decoders.decode(uploads)))
            return [upload.name for upload in uploads], futures

    async def explain(self, request: Request) -> tuple[str, Scores, dict[str, Any]]:
        """The image's name, its scores, and the fields that the page draws."""
        async with self._receive_one(request) as (upload, pixels):
            name = upload.name
        with batcher_errors():
            future = self.batcher.call(lambda: explain(self.classifier, pixels))
        (found,) = await gather_results(request, [future])
        fields = await asyncio.to_thread(steps_to_json, pixels, found.steps)
        return name, found.scores, {"map": map_to_json(self.classifier, found.map), **fields}

    async def map(self, request: Request, label: int) -> dict[str, Any]:
        """The image's name and its map of one class."""
        async with self._receive_one(request) as (upload, pixels):
            name = upload.name
        with batcher_errors():
            future = self.batcher.call(lambda: compute_map(self.classifier, pixels, label))
        (found,) = await gather_results(request, [future])
        return {"name": name, "map": map_to_json(self.classifier, found)}

    async def correct(self, request: Request, label: int) -> str:
        """Store an image that can be read, as it was sent, under its right class; its path in the folder."""
        assert self.corrections is not None  # else there is no route
        async with self._receive_one(request) as (upload, _):
            return await asyncio.to_thread(self.corrections.add, bytes(upload.data), label)

    @contextlib.asynccontextmanager
    async def _receive_one(self, request: Request) -> AsyncIterator[tuple[Upload, Tensor]]:
        """The one image of a request and its pixels; its bytes are in memory until the block ends."""
        self.check_capacity()
        async with receive_uploads(request, self.limits, self.budget) as uploads:
            if len(uploads) > 1:
                raise RequestError(422, f"this takes one image at a time, not {len(uploads)}; /v1/predict takes many")
            (pixels,) = await run_while_connected(request, self.decoders.decode(uploads))
            yield uploads[0], pixels

    def check_capacity(self) -> None:
        """Refuse a request before its body is read where the server is stopping or the queue is full."""
        with batcher_errors():
            if self.draining:
                raise BatcherClosed
            if len(self.batcher) >= self.batcher.queue:
                raise QueueFull

    def answer(self, name: str, scores: Scores, k: int | None) -> dict[str, Any]:
        """One image's entry in the response."""
        entry: dict[str, Any] = {"name": name, "classes": self.top_classes(scores.probabilities, k)}
        if scores.distances is not None:
            distance = float(scores.distances[0])
            entry |= {"refused": distance > 1, "distance": distance}
        return entry

    def top_classes(self, row: Tensor, k: int | None) -> list[dict[str, Any]]:
        """The k most probable of (1, K); None: five, and of a multi-label model those that reach their thresholds."""
        limits, labels = self.classifier.thresholds, self.classifier.labels
        classes: list[dict[str, Any]] = [
            {"index": index, "name": labels[index], "probability": value}
            for index, value in zip(*self.classifier.top_classes(row, k)[0], strict=True)
        ]
        return classes if limits is None else [one | {"threshold": float(limits[one["index"]])} for one in classes]

    def close(self) -> None:
        self.draining = True
        self.batcher.close(LAST_BATCH_SECONDS)
        self.classifier.engine.close()
        self.decoders.close()


@contextlib.contextmanager
def batcher_errors() -> Iterator[None]:
    """Turn what the batcher raises into answers."""
    try:
        yield
    except QueueFull:
        raise try_again("the queue is full; try again in a moment") from None
    except BatcherClosed:
        raise try_again("the server is stopping") from None


async def gather_results(request: Request, futures: "Sequence[Future[Result]]") -> list[Result]:
    """The futures' results; if the client disconnects first, they are cancelled and cost nothing more."""
    try:
        return await run_while_connected(request, asyncio.gather(*map(asyncio.wrap_future, futures)))
    except ClientDisconnected:
        raise
    except Exception:  # the batcher has logged it, once for all of its batch
        raise RequestError(500, "the model failed on this batch; see the server's log") from None


async def run_while_connected(request: Request, work: Awaitable[Result]) -> Result:
    """The result of some work, which is cancelled if the client disconnects first."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(wait_for_disconnect(request))
    disconnect.add_done_callback(lambda _: task.cancel())
    try:
        return await task
    except asyncio.CancelledError:
        if disconnect.done() and not disconnect.cancelled():
            raise ClientDisconnected from None
        raise
    finally:
        disconnect.cancel()


async def wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
