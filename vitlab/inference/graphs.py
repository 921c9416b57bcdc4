"""A model's forward pass on a GPU, compiled and recorded as a CUDA graph for one size of batch.

A graph is launched at once, so that the host, which takes milliseconds to launch a ViT's kernels one by one, is no
longer what a small batch waits for.
"""

import copy
import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitlab.models.variants import Model

WARM_UP = 3  # calls before the recording, in which compilers and libraries initialize themselves
recording = threading.Lock()  # of graphs: one at a time in a process


class GraphedForward:
    """Calls the model for up to as many images as it was recorded for; smaller batches are filled with zeros.

    With `half` it computes in mixed bf16.
    """

    def __init__(self, model: Model, what: str, images: Tensor, half: bool) -> None:
        forward = torch.compile(model.features if what == "features" else model, dynamic=False)
        self.half, self.using = half, threading.Lock()
        self.images, self.graph = images.clone(), torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        with recording, torch.inference_mode():
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    self.compute(forward)
            torch.cuda.current_stream().wait_stream(stream)
            # thread-local, as other threads may use the GPU meanwhile
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.values = self.compute(forward)
            torch.cuda.synchronize()

    def compute(self, forward: Callable[[Tensor], Tensor]) -> Tensor:
        # without the cache of casts, whose tensors would belong to the recording
        with torch.autocast("cuda", torch.bfloat16, enabled=self.half, cache_enabled=False):
            return forward(self.images)

    def __call__(self, images: Tensor) -> Tensor:
        count = len(images)
        with self.using:  # its input and output are one place each
            self.images[:count].copy_(images)
            if count < len(self.images):
                self.images[count:].zero_()
            self.graph.replay()
            return self.values[:count].clone()


def halved(model: Model) -> Model:
    """A copy whose dense layers and patch projection are bf16, as mixed precision casts them in every call."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if type(module) in (nn.Linear, nn.Conv2d):  # standardized convolutions keep the precision of their kernels
            module.to(torch.bfloat16)
    return model
