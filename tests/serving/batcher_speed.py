"""The batcher alone, in process: images a second through it and one by one.

python tests/serving/batcher_speed.py [MODEL] [SECONDS]       B/16 for 10 s each, by default
"""

import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor

import vitlab
from vitlab.prediction import Classifier
from vitlab.prediction.classifier import Scores
from vitlab.serving.batcher import Batcher, QueueFull

PICTURES = 64


def compare(classifier: Classifier, seconds: float, max_batch: int = 256) -> tuple[float, float]:
    """Images a second (one by one, batched), both from bytes on the CPU to probabilities on the CPU."""
    shape = (PICTURES, *classifier.model.config.image_size, 3)
    pictures = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pictures = pictures.permute(0, 3, 1, 2)  # as decoders give them
    if classifier.device.type == "cuda":
        for size in (1, max_batch):
            classifier.engine.prepare(size)
    for size in (1, max_batch):  # what a device sets up for a shape it has not seen
        for _ in range(3):
            classifier.probabilities(pictures[:1].repeat(size, 1, 1, 1))
    return alone(classifier, pictures, seconds), batched(classifier, pictures, seconds, max_batch)


def alone(classifier: Classifier, pictures: Tensor, seconds: float) -> float:
    start, done = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < seconds:
        classifier.start([pictures[done % PICTURES]])()
        done += 1
    return done / spent


def batched(classifier: Classifier, pictures: Tensor, seconds: float, max_batch: int) -> float:
    """As many callers as the queue has places, each of which submits again after its answer."""
    sizes, ends = [0], [time.perf_counter()]

    def record(size: int, _: float) -> None:
        sizes.append(size)
        ends.append(time.perf_counter())

    def run(items: Sequence[Tensor]) -> Callable[[], list[Scores]]:
        scores = classifier.start(items)
        return lambda: scores().each()

    batcher: Batcher[Tensor, Scores] = Batcher(
        run,
        max_batch=max_batch,
        queue=4 * max_batch,
        on_batch=record,
    )
    waiting: deque[Future[Scores]] = deque()
    asked = 0
    while ends[-1] - ends[0] < seconds:
        try:
            waiting.append(batcher.submit(pictures[asked % PICTURES]))
            asked += 1
        except QueueFull:
            waiting.popleft().result()
    for future in waiting:
        future.cancel()
    batcher.close(60)
    return sum(sizes) / (ends[-1] - ends[0])


if __name__ == "__main__":
    name, seconds = ([*sys.argv[1:], "B/16", "10"] if len(sys.argv) < 2 else [*sys.argv[1:], "10"])[:2]
    with tempfile.TemporaryDirectory() as spare:
        vitlab.save(vitlab.create(name), Path(spare) / "run")
        classifier = Classifier(Path(spare) / "run")
    one, many = compare(classifier, float(seconds))
    print(f"{name} on {classifier.device}: one by one {one:.0f} images/s, batched {many:.0f}, {many / one:.2f} times")
