"""A converted folder on the Hugging Face hub, through huggingface_hub, with a model card as its README.md."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from vitlab.errors import UserError
from vitlab.files import write_text
from vitlab.models.config import Preprocess
from vitlab.models.variants import Model
from vitlab.terminal import printable
from vitlab.text import brief
from vitlab.weights.beside import beside_path, describe_preprocess
from vitlab.weights.formats.vitlab import WEIGHTS
from vitlab.weights.load import load

README = "README.md"


def check_push(repo: str) -> None:
    """Raise UserError, before anything is converted, where an upload cannot work: no package or token, a wrong name."""
    try:
        from huggingface_hub import get_token
    except ImportError:
        raise UserError("--push-to-hub needs huggingface_hub: pip install 'vitlab[hub]'") from None
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise UserError(f"--push-to-hub takes OWNER/NAME, not '{repo}'")
    if get_token() is None:
        raise UserError("--push-to-hub needs a token that may write: run `hf auth login`, or set HF_TOKEN")


def push_to_hub(folder: Path, repo: str, provenance: Mapping[str, str]) -> str:
    """Upload a folder of transformers' format; returns its address. A new repository is private.

    `provenance` is that of the model which was converted. The card is written to the folder too; one that is on the hub
    already stays, as someone may have edited it.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    hide_paths(folder)
    write_text(folder / README, model_card(load(folder), repo, provenance))
    try:
        api = HfApi()
        address = str(api.create_repo(repo, private=True, exist_ok=True))
        kept = [README] if api.file_exists(repo, README) else None
        api.upload_folder(repo_id=repo, folder_path=folder, ignore_patterns=kept, commit_message="Upload by vitlab")
        return address
    except HfHubHTTPError as error:
        raise UserError(f"the hub refuses {repo}: {brief(error)}; the folder {folder} is complete") from None
    except Exception as error:  # no connection, HF_HUB_OFFLINE: classes of whatever HTTP library it uses
        raise UserError(f"{repo} could not be uploaded: {brief(error)}; the folder {folder} is complete") from None


def hide_paths(folder: Path) -> None:
    """Leave the names of files in the provenance, without the folders of this machine."""
    path = beside_path(folder / WEIGHTS)
    if path.is_file():
        data = json.loads(path.read_text())
        data["provenance"] = names_alone(data["provenance"] or {})
        write_text(path, json.dumps(data, indent=2) + "\n")


def names_alone(provenance: Mapping[str, str]) -> dict[str, str]:
    return {key: Path(value).name if value.startswith(("/", "~", ".")) else value for key, value in provenance.items()}


# ---- the card


def model_card(model: Model, repo: str, provenance: Mapping[str, str]) -> str:
    """README.md: what the hub shows and searches by, how to use the model, and where it comes from."""
    height, width = model.config.image_size
    size = f"{sum(p.numel() for p in model.parameters()) / 1e6:.3g} M parameters, {height}x{width} pixels"
    classes = f"{model.config.classes:,} classes"
    several = ", any number of them for an image (sigmoid)" if model.card.thresholds is not None else ""
    return f"""---
library_name: transformers
pipeline_tag: image-classification
tags:
- vision-transformer
- vitlab
---

# {repo.partition("/")[2]}

A Vision Transformer for {classes}{several}: {size}.

```python
from transformers import pipeline

classify = pipeline("image-classification", "{repo}")
classify("photo.jpg")
```

With vitlab: `vitlab predict {repo} photo.jpg`.

{table(model.card.preprocess, provenance)}

{class_list(model.card.labels)}
"""


def table(preprocess: Preprocess, provenance: Mapping[str, str]) -> str:
    rows = {"preprocessing": describe_preprocess(preprocess), **names_alone(provenance)}
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {cell(value)} |" for key, value in rows.items())])


def class_list(labels: Iterable[str] | None) -> str:
    return "" if labels is None else f"Classes: {', '.join(f'`{cell(label)}`' for label in labels)}."


def cell(text: str) -> str:
    """Text that neither ends a cell of a table nor a code span."""
    return printable(text).replace("|", "\\|").replace("`", "'")
