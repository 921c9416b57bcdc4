"""Checkpoints of a sharded run: every process writes its own shards, through torch.distributed.checkpoint.

They load on any number of processes, one included, sharded or not.

Their metadata is a pickle, so it is read by an unpickler that allows the classes it is made of and nothing else.
"""

import pickle
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import async_save

from vitlab.errors import UserError
from vitlab.text import brief
from vitlab.training import checkpoint
from vitlab.training.checkpoint import METADATA, CheckpointMeta, disk_errors, sibling
from vitlab.training.parallel import Cluster

ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
        *("StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "float32", "float64", "bfloat16", "float16", "int64"},
    "pathlib": {"PosixPath", "Path"},
    "pathlib._local": {"PosixPath", "Path"},
    "collections": {"OrderedDict"},
}


class ShardReader(FileSystemReader):
    """Reads tensors from files, and the metadata through `RestrictedUnpickler`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # the signature is the parent's
        metadata = read_metadata(Path(self.path))
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class RestrictedUnpickler(pickle.Unpickler):
    """Raises UserError for any class that is not in `ALLOWED`."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in ALLOWED.get(module, ()):
            raise UserError(f"the checkpoint's metadata asks for {module}.{name}, which does not belong there")
        return super().find_class(module, name)


def read_metadata(folder: Path) -> Metadata:
    """The names, shapes and places of a checkpoint's tensors; raises UserError unless all are tensors in `folder`."""
    try:
        with (folder / METADATA).open("rb") as file:
            metadata = RestrictedUnpickler(file).load()
        inside = all(Path(info.relative_path).name == info.relative_path for info in metadata.storage_data.values())
    except UserError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise UserError(f"{folder / METADATA} is damaged: {brief(error)}") from None
    if not isinstance(metadata, Metadata) or not inside:  # files outside the folder do not belong to it
        raise UserError(f"{folder / METADATA} is not the metadata of a checkpoint")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):  # anything else would be unpickled too
            raise UserError(f"'{name}' in {folder} is not a tensor; the checkpoint is not used")
    return metadata


class ShardedWriter:
    """Writes checkpoints while training continues: the state is copied to the CPU, the rest happens in a thread.

    Its messages go through a process group of their own, so that they cannot mix with the trainer's. The first process
    makes the folder, writes its metadata and renames it; a checkpoint without metadata is ignored.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        self.thread = ThreadPoolExecutor(1)
        self.pending: Future[None] | None = None

    def save(self, folder: Path, state: dict[str, Tensor], meta: CheckpointMeta) -> None:
        """As `write_checkpoint`, by all processes together; the one before it is finished first."""
        self.wait()
        if self.cluster.first:
            with disk_errors(folder):
                checkpoint.make_new_folder(folder)
        self.cluster.barrier()
        writer = FileSystemWriter(sibling(folder, "new"), overwrite=True)
        written = async_save(dict(state), storage_writer=writer, process_group=self.group)
        self.pending = self.thread.submit(self._finish, written, folder, meta)

    def _finish(self, written: Any, folder: Path, meta: CheckpointMeta) -> None:
        with disk_errors(folder):
            try:
                written.result()
            except CheckpointException as error:  # one error per process that failed
                raise OSError(str(next(iter(error.failures.values()))[0])) from error
            if self.cluster.first:
                checkpoint.write_meta(sibling(folder, "new"), meta)
                checkpoint.commit_folder(folder)

    def wait(self) -> None:
        """Wait until the checkpoint begun last is on disk; raises the error of writing it."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def check_pending(self) -> None:
        """Raise the error of the checkpoint begun last, if it has failed already."""
        if self.pending is not None and self.pending.done():
            self.wait()


def read_state(folder: Path, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint of either kind, by name; raises UserError where they cannot be read.

    Those of a sharded one are sharded, or not, as the tensors in `expected` are.
    """
    if not (folder / METADATA).exists():
        return checkpoint.read_checkpoint(folder)
    state: dict[str, Tensor] = {}
    for key, entry in read_metadata(folder).state_dict_metadata.items():
        if key not in expected:
            raise UserError(f"the checkpoint's tensor '{key[:100]}' does not belong to this run's model")
        scalar = isinstance(entry, TensorStorageMetadata) and not entry.size
        state[key] = torch.zeros(()) if scalar else torch.zeros_like(expected[key])
    try:
        load_shards(dict(state), storage_reader=ShardReader(folder))
    except CheckpointException as error:
        raise UserError(f"the shards in {folder} do not make up this run's model: {brief(error)}") from None
    return state
