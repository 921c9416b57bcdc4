"""A model with its queue, its decoders and its books: what the routes ask."""

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from fastapi import Request
from torch import Tensor

from vitlab.predict import Classifier
from vitlab.serving.batcher import Batcher, Closed, Full
from vitlab.serving.decoding import Decoders
from vitlab.serving.explain import describe, look
from vitlab.serving.limits import RETRY, Ledger, Limits, Refused, check_queue
from vitlab.serving.metrics import Metrics
from vitlab.serving.uploads import Gone, receiving

Result = TypeVar("Result")
LAST_BATCH = 5.0  # seconds for the batch that is running when all requests have ended


@dataclass(frozen=True)
class Settings:
    """How the server runs."""

    name: str = "model"
    token: str | None = None
    max_batch: int | None = None  # 64, and 16 on a CPU, where larger ones make everybody wait and nothing faster
    max_wait: float = 0.005  # seconds
    queue: int = 256
    processes: int | None = None  # that decode; as many as cores, up to 8
    limits: Limits = dataclasses.field(default_factory=Limits)


class Service:
    """Answers requests; one instance lives as long as its server."""

    def __init__(self, classifier: Classifier, settings: Settings) -> None:
        check_queue(settings.limits, settings.queue)
        self.classifier, self.settings, self.limits = classifier, settings, settings.limits
        self.metrics = Metrics()
        self.ledger = Ledger(self.limits.held_bytes)
        processes = settings.processes or min(8, os.cpu_count() or 1)
        self.decoders = Decoders(classifier.model.config.image_size, classifier.preprocess, self.limits, processes)
        self.batcher: Batcher[Tensor, Tensor] = Batcher(
            self._run,
            max_batch=settings.max_batch or (16 if classifier.device.type == "cpu" else 64),
            max_wait=settings.max_wait,
            queue=settings.queue,
            watch=self.metrics.ran,
        )
        self.draining = False
        self.metrics.gauge("vitlab_queue_length", "Images with a seat in the queue.", lambda: len(self.batcher))
        self.metrics.gauge("vitlab_upload_bytes", "Bytes of uploads in memory.", lambda: self.ledger.held)

    def _run(self, pixels: Sequence[Tensor]) -> Sequence[Tensor]:
        return list(self.classifier.probabilities(torch.stack(list(pixels))))

    async def warm(self) -> None:
        """One answer of each kind, so that the first client does not pay for what torch sets up."""
        await asyncio.to_thread(self.decoders.start)
        blank = torch.zeros(3, *self.classifier.model.config.image_size, dtype=torch.uint8)
        await asyncio.wrap_future(self.batcher.submit(blank))
        await asyncio.wrap_future(self.batcher.call(lambda: look(self.classifier, blank)))

    async def predict(self, request: Request) -> list[tuple[str, Tensor]]:
        """Every image's name and probabilities."""
        names, futures = await self._enqueue(request)
        rows = await answers(request, futures)
        return list(zip(names, rows, strict=True))

    async def _enqueue(self, request: Request) -> "tuple[list[str], list[Future[Tensor]]]":
        """From a body to places in the queue; when this returns nothing holds the body any more."""
        self.check_room()
        async with receiving(request, self.limits, self.ledger) as uploads:
            with refusals(), self.batcher.reserve(len(uploads)) as seats:
                futures = seats.submit(await unless_gone(request, self.decoders.pixels(uploads)))
            return [upload.name for upload in uploads], futures

    async def explain(self, request: Request) -> tuple[str, Tensor, dict[str, Any]]:
        """The one image's name and probabilities, and what there is to draw."""
        name, pixels = await self._one(request)
        with refusals():
            future = self.batcher.call(lambda: look(self.classifier, pixels))
        ((row, steps),) = await answers(request, [future])
        return name, row, await asyncio.to_thread(describe, pixels, steps)

    async def _one(self, request: Request) -> tuple[str, Tensor]:
        self.check_room()
        async with receiving(request, self.limits, self.ledger) as uploads:
            if len(uploads) > 1:
                sentence = f"one image is explained at a time, not {len(uploads)}; /v1/predict takes many"
                raise Refused(422, sentence)
            (pixels,) = await unless_gone(request, self.decoders.pixels(uploads))
            return uploads[0].name, pixels

    def check_room(self) -> None:
        """A busy or stopping server says so before it reads a body."""
        if self.draining:
            raise Refused(503, "the server is stopping", RETRY)
        if len(self.batcher) >= self.batcher.queue:
            raise busy()

    def top(self, row: Tensor, k: int) -> list[dict[str, Any]]:
        shares, places = row.topk(min(k, len(row)))
        labels = self.classifier.labels
        return [
            {"index": place, "name": labels[place], "probability": share}
            for share, place in zip(shares.tolist(), places.tolist(), strict=True)
        ]

    def close(self) -> None:
        self.draining = True
        self.batcher.close(LAST_BATCH)
        self.decoders.close()


def busy() -> Refused:
    return Refused(503, "the queue is full; try again in a moment", RETRY)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """What the batcher will not take, as answers."""
    try:
        yield
    except Full:
        raise busy() from None
    except Closed:
        raise Refused(503, "the server is stopping", RETRY) from None


async def answers(request: Request, futures: "Sequence[Future[Result]]") -> list[Result]:
    """The futures' results; if the client goes away first, they are cancelled and cost nothing more."""

    async def gathered() -> list[Result]:
        return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))

    try:
        return await unless_gone(request, gathered())
    except (Gone, Refused):
        raise
    except Exception:  # the batcher has logged it, once for all of its batch
        raise Refused(500, "the model failed on this batch; the server's log says why") from None


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of some work, which is cancelled if the client goes away first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request))
    gone.add_done_callback(lambda _: task.cancel())
    try:
        return await task
    except asyncio.CancelledError:
        if gone.done() and not gone.cancelled():
            raise Gone from None
        raise
    finally:
        gone.cancel()


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
