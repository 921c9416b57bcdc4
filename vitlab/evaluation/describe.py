"""The scores of an evaluation in a few lines, from the JSON that it is written as."""

from collections.abc import Mapping
from typing import Any


def describe_scores(scores: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, value) of the scores that are read first."""
    split, images = scores.get("split", "test"), f"{scores['images']:,} images"
    if scores.get("multi_label"):
        rows = [(f"{split} mAP", f"{scores['map']:.1%} of {images}")]
        return [*rows, ("F1", f"{scores['f1_micro']:.1%}"), ("without a mistake", f"{scores['exact']:.1%}")]
    top1, error = scores["top1"], scores["calibration_error"]
    between = f"({top1['low']:.1%} to {top1['high']:.1%} with 95 % confidence)"
    rows = [(f"{split} accuracy", f"{top1['value']:.1%} of {images} {between}")]
    if scores.get("top5") is not None:
        rows.append(("top-5 accuracy", f"{scores['top5']['value']:.1%}"))
    rows.append(("calibration error", f"{error['value']:.1%}"))
    refused = scores.get("refused")
    if refused is not None:
        rows.append(("refused as none of these", f"{refused['share']['value']:.1%}"))
    if scores.get("confused"):
        truth, guess, count = scores["confused"][0]
        rows.append(("most confused", f"{truth} taken for {guess}, {count} {'image' if count == 1 else 'images'}"))
    return rows
