"""Data sets on the Hugging Face hub, as parquet: OWNER/NAME, OWNER/NAME:CONFIG where it has several configs, and
OWNER/NAME@REVISION or OWNER/NAME:CONFIG@REVISION for a branch, a tag or a commit."""

import re
from pathlib import Path

from vitlab.data.parquet import ParquetSource
from vitlab.data.parquet import splits as parquet_splits
from vitlab.data.storage import split_of
from vitlab.errors import UserError
from vitlab.text import listed

CONVERTED = "refs/convert/parquet"  # the branch on which the hub keeps its own parquet copy of any set


def is_id(spec: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?(@\w[\w./-]*)?", spec) is not None


def splits(spec: str) -> dict[str, ParquetSource]:
    """Downloaded once to the hub's own cache; offline (HF_HUB_OFFLINE=1, or no network) the cache is used."""
    name, _, revision = spec.partition("@")
    repo, _, config = name.partition(":")
    root = download(repo, revision or None)
    files = sorted(root.rglob("*.parquet"))
    if not files and not revision:
        root = download(repo, CONVERTED)
        files = sorted(root.rglob("*.parquet"))
    if not files:
        raise UserError(f"the hub's data set '{repo}' has no parquet files; download it and name its folder")
    return parquet_splits(one_config(repo, config, files, root), root)


def download(repo: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(f"'{repo}' is no folder here; for the hub: pip install vitlab[hub]") from None
    try:
        return Path(snapshot_download(repo, repo_type="dataset", revision=revision, allow_patterns="*.parquet"))
    except Exception as error:  # the hub's client raises its own errors, httpx's and the operating system's
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"there is no folder '{repo}' here, and no data set of that name could be had from the hub: {why}"
        ) from None


def commit_of(source: object) -> str:
    """The commit of a set in the hub's cache, datasets--OWNER--NAME/snapshots/COMMIT/...; "" of any other."""
    found = re.search(r"/snapshots/([0-9a-f]{40})/", source.files[0]) if isinstance(source, ParquetSource) else None
    return found[1] if found else ""


def one_config(repo: str, config: str, files: list[Path], root: Path) -> list[Path]:
    """The files of one config; configs are the folders that are named neither for a split nor "data"."""
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
