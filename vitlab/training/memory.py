"""Running out of memory, on any device, as a sentence."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vitlab.config import UserError

# On the CPU torch has no type of its own for it; the last are oneDNN's words.
ON_CPU = ("DefaultCPUAllocator", "not enough memory", "Cannot allocate memory", "could not create a primitive")


def out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(words in str(error) for words in ON_CPU)


@contextmanager
def memory_errors(doing: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not out_of_memory(error):
            raise
        raise UserError(f"out of memory while {doing}; {remedy}") from error
