"""Data sets on the Hugging Face hub, as parquet files.

OWNER/NAME, OWNER/NAME:CONFIG where there are several configs, and OWNER/NAME@REVISION or OWNER/NAME:CONFIG@REVISION
for a branch, a tag or a commit.
"""

import re
from pathlib import Path

from vitlab.data import parquet
from vitlab.data.split_names import split_of
from vitlab.errors import UserError
from vitlab.text import brief, listed

CONVERTED = "refs/convert/parquet"  # the branch on which the hub keeps its own parquet copy of any set


def is_id(spec: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?(@\w[\w./-]*)?", spec) is not None


def splits(spec: str) -> dict[str, parquet.ParquetSource]:
    """The splits of a data set, downloaded once to the hub's own cache, which is enough when offline."""
    name, _, revision = spec.partition("@")
    repo, _, config = name.partition(":")
    for branch in [revision] if revision else [None, CONVERTED]:
        root = download(repo, branch)
        files = sorted(root.rglob("*.parquet"))
        if files:
            return parquet.splits(one_config(repo, config, files, root), root)
    raise UserError(f"the hub's data set '{repo}' has no parquet files; download it and name its folder")


def download(repo: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(f"'{repo}' is not a folder here; for the hub: pip install 'vitlab[hub]'") from None
    try:
        return Path(snapshot_download(repo, repo_type="dataset", revision=revision, allow_patterns="*.parquet"))
    except Exception as error:  # the hub's client raises its own errors, httpx's and the operating system's
        raise UserError(
            f"there is no folder '{repo}' here, and the hub's data set could not be downloaded: {brief(error)}"
        ) from None


def commit_of(source: object) -> str:
    """The commit of a data set in the hub's cache, datasets--OWNER--NAME/snapshots/COMMIT/...; "" of any other."""
    path = source.files[0] if isinstance(source, parquet.ParquetSource) else ""
    match = re.search(r"/snapshots/([0-9a-f]{40})/", path)
    return match[1] if match else ""


def one_config(repo: str, config: str, files: list[Path], root: Path) -> list[Path]:
    """The files of one config; configs are the folders whose names are neither a split nor "data"."""
    folders: dict[str, list[Path]] = {}
    for file in files:
        parts = file.relative_to(root).parts[:-1]
        named = [part for part in parts if part != "data" and split_of(part) is None]
        folders.setdefault(named[0] if named else "", []).append(file)
    if config in folders:
        return folders[config]
    if not config and len(folders) == 1:
        return files
    names = listed(name or "(none)" for name in sorted(folders))
    raise UserError(f"the hub's data set '{repo}' has the configs {names}; write {repo}:CONFIG")
