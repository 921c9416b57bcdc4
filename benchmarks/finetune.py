"""`vitlab finetune` against 25 lines of logistic regression, and against plain fine-tuning for the same time.

    python benchmarks/finetune.py WEIGHTS SET[:PER_CLASS]... --seeds 3 --minutes 10 --out finetune.jsonl

Every row is a process of its own, whose CPU seconds are counted with those of its children: timm's features and
scikit-learn's logistic regression on them; vitlab's first stage alone, without its report; `vitlab finetune`; and all
weights by SGD from a head of zeros, for as long. A finished row is not repeated.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.data.open import open_data
from vitlab.data.source import Data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", help="a timm ViT's weights, such as vit_tiny_patch16_224.safetensors")
    parser.add_argument("sets", nargs="+", help="data sets; pets:10 uses ten training images of each class")
    parser.add_argument("--model", default="vit_tiny_patch16_224", help="its name in timm")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--only", default="", help=f"some of {','.join(ROWS)}")
    parser.add_argument("--out", type=Path, default=Path("finetune.jsonl"))
    parser.add_argument("--row", help=argparse.SUPPRESS)  # this process is one row
    given = parser.parse_args()
    if given.row:
        print(json.dumps(run_row(given, json.loads(given.row))))
        return
    done = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    for name in given.sets:
        for seed in range(given.seeds):
            for what in given.only.split(",") if given.only else ROWS:
                row = {"set": name, "seed": seed, "what": what, "minutes": given.minutes}
                if not any(row.items() <= found.items() for found in done):
                    words = [sys.executable, *sys.argv, "--row", json.dumps(row)]
                    found = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
                    result = json.loads(found.splitlines()[-1])
                    print(result, flush=True)
                    with given.out.open("a") as file:
                        file.write(json.dumps(row | result) + "\n")


def run_row(given: Any, row: dict[str, Any]) -> dict[str, Any]:
    """The test accuracy of one row with its wall and CPU seconds."""
    began = time.monotonic()
    accuracy = ROWS[row["what"]](given, row)
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    cpu = sum(each.ru_utime + each.ru_stime for each in used)
    return {"accuracy": accuracy, "seconds": round(time.monotonic() - began, 1), "cpu": round(cpu, 1)}


def spec_of(row: dict[str, Any]) -> tuple[str, int | None]:
    name, _, count = row["set"].rpartition(":")
    return (name, int(count)) if name and count.isdigit() else (row["set"], None)


def open_set(row: dict[str, Any]) -> Data:
    spec, count = spec_of(row)
    return open_data(spec, seed=row["seed"], per_class=count)


def logistic_regression(given: Any, row: dict[str, Any]) -> float:
    """What a friend would write: timm's features of the center crops, scikit-learn's logistic regression."""
    import torch
    from sklearn.linear_model import LogisticRegression

    timm: Any = import_module("timm")  # has few types
    data = open_set(row)
    model = timm.create_model(given.model, checkpoint_path=given.weights).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))

    def features(source: Any) -> Any:
        rows = []
        with torch.no_grad():
            for start in range(0, len(source), 32):
                part = range(start, min(start + 32, len(source)))
                images = torch.stack([transform(source.image(i).convert("RGB")) for i in part])
                rows.append(model.forward_head(model.forward_features(images), pre_logits=True).numpy())
        return np.concatenate(rows)

    fitted = LogisticRegression(max_iter=1000).fit(features(data.train), data.train.labels)
    return float(fitted.score(features(data.test), data.test.labels))


def first_stage(given: Any, row: dict[str, Any]) -> float:
    """The first stage of `vitlab finetune` and the test, without a report."""
    from vitlab.evaluation.extract import extract
    from vitlab.finetuning.head import fit_heads, frozen_features
    from vitlab.finetuning.plan import make_plan

    spec, count = spec_of(row)
    pairs = [f"seed={row['seed']}", "device=cpu", *([f"per_class={count}"] if count else [])]
    plan = make_plan(spec, given.weights, pairs, None)
    assert plan is not None
    with tempfile.TemporaryDirectory() as folder:
        heads = fit_heads(frozen_features(plan.model, plan.data, Path(folder), "cpu"), len(plan.data.classes))
    test = extract(plan.model, plan.data.test, device="cpu")
    return float((heads.final.guesses(test.values) == test.labels).mean())


def command(given: Any, row: dict[str, Any], *words: str) -> float:
    """The test accuracy of a `vitlab` command that trains."""
    from vitlab.evaluation.evaluate import evaluate
    from vitlab.weights import load

    spec, count = spec_of(row)
    pairs = [f"seed={row['seed']}", "device=cpu", *([f"per_class={count}"] if count else [])]
    with tempfile.TemporaryDirectory() as folder:
        own = ["finetune", spec, "--weights", given.weights, "--out", f"{folder}/run", *words, *pairs]
        subprocess.run([str(Path(sys.executable).parent / "vitlab"), *own], check=True, stdout=sys.stderr)
        return evaluate(load(f"{folder}/run"), open_set(row).test, device="cpu").top1.value


def staged(given: Any, row: dict[str, Any]) -> float:
    return command(given, row, "--minutes", str(given.minutes))


def plain(given: Any, row: dict[str, Any]) -> float:
    """All weights from a head of zeros, as long as the time allows: what `vitlab finetune` did before."""
    return command(given, row, "--paper")


ROWS: dict[str, Callable[[Any, dict[str, Any]], float]] = {
    "logistic regression": logistic_regression,
    "first stage": first_stage,
    "finetune": staged,
    "plain": plain,
}

if __name__ == "__main__":
    main()
