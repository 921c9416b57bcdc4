"""When a job is long enough that making the engine faster pays."""

from vitlab.inference.engine import Engine

FIRST = 5  # batches before the speed is known
PAYS = {"cuda": 20.0, "cpu": 180.0}  # seconds of the model's time left, from which it takes less than it saves
LONG = 900.0  # the same for compiling on a CPU


class Payback:
    """Makes the engine faster for the batches of a long job, once some of them have shown that it pays.

    On a GPU in the background: compiling a ViT takes 5 to 30 seconds and then saves a sixth of the model's time or more
    (on an H200: B/16 from 8,800 to 10,700 images a second, L/16 from 3,050 to 3,600). On a CPU while the job waits:
    ten seconds or more of exporting may save a tenth, and a minute of compiling a little.
    """

    def __init__(self, engine: Engine, batch: int, images: int) -> None:
        self.engine, self.batch, self.left = engine, batch, images
        self.calls, self.fastest, self.done = 0, float("inf"), False  # seconds of an image

    def count(self, images: int, seconds: float) -> None:
        """Note that the model took so long for so many images; make the engine faster if it is time to."""
        self.calls, self.left = self.calls + 1, self.left - images
        self.fastest = min(self.fastest, seconds / max(1, images))
        kind, remaining = self.engine.device.type, self.fastest * self.left
        if self.done or self.calls < FIRST or remaining < PAYS.get(kind, float("inf")):
            return
        self.done = True
        if kind == "cuda":
            self.engine.warm_up([self.batch])
        else:
            self.engine.prepare(self.batch, thorough=remaining > LONG)
