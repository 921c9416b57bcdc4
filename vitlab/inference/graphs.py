"""A model's forward pass on a GPU, compiled and recorded as CUDA graphs, one for each size of batch.

A graph is launched at once, so that the host, which takes milliseconds to launch a ViT's kernels one by one, is no
longer what a small batch waits for.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitlab.device import cpu_threads, own_workspaces
from vitlab.inference.slots import Pending, Slots
from vitlab.kernels.class_token import use_class_token
from vitlab.kernels.compiling import compiled
from vitlab.kernels.install import use_kernels
from vitlab.kernels.rounding import round_weights
from vitlab.models.variants import Model
from vitlab.models.vit import ViT

WARM_UP = 3  # calls before the recording, in which compilers and libraries initialize themselves
SHAPES = 64  # that torch may compile a model's code for; its own limit, 8, is shared by all models of a class
recording = threading.Lock()  # of graphs: one at a time in a process


class Recording:
    """A graph, and the places that it reads images from and writes values to."""

    def __init__(self, images: Tensor, values: Tensor, graph: torch.cuda.CUDAGraph) -> None:
        self.images, self.values, self.graph = images, values, graph

    def replay(self, images: Tensor) -> Tensor:
        """Values of up to as many images as it was recorded for, in their place until the next call."""
        count = len(images)
        self.images[:count].copy_(images, non_blocking=True)
        if count < len(self.images):
            self.images[count:].zero_()
        self.graph.replay()
        return self.values[:count]


class Graphs:
    """The recordings of one module, called in mixed precision with `half`, and of what a `tail` makes of its values.

    One runs at a time, on a stream of their own, so they share a lock and the memory of what they compute in between.
    """

    def __init__(
        self,
        module: nn.Module,
        tail: Callable[[Tensor], Tensor],
        device: torch.device,
        half: bool,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.device, self.half, self.tail, self.dtype = device, half, tail, dtype
        self.forward = compiled(module)  # kept: graphs read the constants of compiled code
        self.using, self.pool = threading.Lock(), torch.cuda.graph_pool_handle()
        # recordings are made on another stream than they run on, as both may happen at one time
        self.stream, self.side, self.copies = (torch.cuda.Stream(device) for _ in range(3))
        self.slots = Slots(device)
        self.recordings: dict[int, Recording] = {}

    def record(self, images: Tensor) -> None:
        """Make a recording for batches like this one."""
        with recording, torch.inference_mode(), torch.cuda.device(self.device), room_for_shapes():
            images, graph = images.clone(), torch.cuda.CUDAGraph()
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                for _ in range(WARM_UP):
                    self.compute(images)
            torch.cuda.synchronize()
            # thread-local, as other threads may use the GPU meanwhile
            capture = torch.cuda.graph(graph, self.pool, self.side, capture_error_mode="thread_local")
            with own_workspaces(), capture:
                values = self.compute(images)
            torch.cuda.synchronize()
        self.recordings[len(images)] = Recording(images, values, graph)

    def compute(self, images: Tensor) -> Tensor:
        # without the cache of casts, whose tensors would belong to the recording
        with torch.autocast("cuda", self.dtype, enabled=self.half, cache_enabled=False):
            values = self.tail(self.forward(images))
        return values.to(torch.promote_types(values.dtype, torch.float32))

    def run(self, batch: int, images: Tensor) -> Tensor:
        """Values of images that are on the device, in the order of the calling thread's work there."""
        caller = torch.cuda.current_stream(self.device)
        with self.using:
            self.stream.wait_stream(caller)
            with torch.cuda.stream(self.stream):
                values = self.recordings[batch].replay(images).clone()
            caller.wait_stream(self.stream)
        images.record_stream(self.stream)  # so that their memory is not used again too early
        values.record_stream(caller)
        return values

    def start(self, batch: int, pixels: Sequence[Tensor]) -> Pending:
        """Begin with images (3, h, w) of bytes that are in the host's memory, where their values come back to."""
        found = self.recordings[batch]
        with self.using, cpu_threads(1):  # several would wait for the last of them, a turn of the scheduler each time
            slot = self.slots.take(found.images, found.values)
            with torch.cuda.stream(self.copies):  # while the batch before is computed
                images = slot.send(pixels)
            self.stream.wait_stream(self.copies)
            with torch.cuda.stream(self.stream):
                return slot.fetch(found.replay(images))


@contextmanager
def room_for_shapes() -> Iterator[None]:
    """Above the limit torch would run what it did not compile without a word; this raises."""
    with torch._dynamo.config.patch(recompile_limit=SHAPES, fail_on_recompile_limit_hit=True):
        yield


def working_copy(model: Model, half: bool, dtype: torch.dtype = torch.bfloat16) -> Model:
    """A copy to compile, with kernels where they fit; with `half`, in 16 bits, to be called in mixed precision.

    The original may be changed meanwhile: an explanation adds hooks to it, for instance.
    """
    model = copy.deepcopy(model).eval().requires_grad_(False)
    if half and isinstance(model, ViT):
        round_weights(model, dtype)
        use_kernels(model, compiled=True)
    elif half:  # standardized convolutions keep the precision of their kernels
        for module in model.modules():
            if type(module) in (nn.Linear, nn.Conv2d):
                module.to(dtype)
    use_class_token(model)
    return model
