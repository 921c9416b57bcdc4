"""Hub ids, through huggingface_hub: its cache, its offline mode, its credentials.

`owner/name@revision` pins a branch, a tag or a commit. A model's card keeps the commit, which never changes.
"""

import re
from pathlib import Path

from vitlab.errors import UserError
from vitlab.text import brief

FILES = ["config.json", "preprocessor_config.json", "model.safetensors", "model.safetensors.vitlab.json"]
FILES += ["model.safetensors.index.json"]  # of weights in several files, which are refused by it
OLD_WEIGHTS = "pytorch_model.bin"
PATIENCE = 5  # seconds to find out whether there is a network


def is_id(source: str) -> bool:
    """Whether this is written as owner/name or owner/name@revision."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@\w[\w./-]*)?", source) is not None


def looks_like_id(source: str) -> bool:
    """Whether this is a hub id and no path; a suffix of weights or an existing folder `owner` make it one."""
    owner, name = source.partition("/")[0], source.partition("@")[0]
    return is_id(source) and not re.search(r"\.(safetensors|npz|pth|pt|bin)$", name) and not Path(owner).exists()


def commit_of(path: Path) -> str | None:
    """The commit of a file in the hub's cache: models--OWNER--NAME/snapshots/COMMIT/FILE."""
    folder = path.absolute().parent
    is_commit = folder.parent.name == "snapshots" and re.fullmatch(r"[0-9a-f]{40}", folder.name)
    return folder.name if is_commit else None


def page_of(repo: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repo}"


def is_available(name: str) -> bool:
    """Whether a model's files are in the cache, or the hub answers for them within seconds."""
    try:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

        if isinstance(try_to_load_from_cache(name, FILES[2]), str):
            return True
        return get_hf_file_metadata(hf_hub_url(name, FILES[0]), timeout=PATIENCE).commit_hash is not None
    except Exception:  # no huggingface_hub, offline mode, or whatever its network layers raise, which changes
        return False


def fetch(name: str) -> Path:
    """The folder of a model's files, downloaded unless it is in the cache; a UserError if it cannot be."""
    repo, _, revision = name.partition("@")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise UserError(
            f"'{name}' is not a file or folder here; to download it from the hub, pip install 'vitlab[hub]'"
        ) from None
    try:
        folder = Path(snapshot_download(repo, revision=revision or None, allow_patterns=FILES))
        if not (folder / "model.safetensors").exists():
            commit = commit_of(folder / FILES[0]) or revision or None  # the same, even if the branch moves meanwhile
            folder = Path(snapshot_download(repo, revision=commit, allow_patterns=[*FILES[:2], OLD_WEIGHTS]))
        return folder
    except LocalEntryNotFoundError:
        raise UserError(
            f"'{name}' is not a file or folder here, is not in the hub's cache, and the hub cannot be reached: "
            f"connect to the network (without HF_HUB_OFFLINE), or download its files elsewhere and give their folder"
        ) from None
    except GatedRepoError:
        raise UserError(
            f"'{name}' is for accounts that accepted its terms: log in on the hub, accept them on the model's page, "
            f"{page_of(repo)}, make a token there, and set HF_TOKEN to it"
        ) from None
    except HfHubHTTPError as error:
        raise UserError(f"the hub refuses '{name}': {brief(error)}") from None
    except (OSError, ValueError) as error:  # a lost connection, a full disk, an invalid id
        raise UserError(f"'{name}' could not be downloaded from the hub: {brief(error)}") from None
