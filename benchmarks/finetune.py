"""`vitlab finetune` against 25 lines of logistic regression, and against plain fine-tuning for the same time.

    python benchmarks/finetune.py WEIGHTS SET[:PER_CLASS]... --seeds 3 --minutes 10 --out finetune.jsonl

Rows, each a process of its own: timm's features and scikit-learn's logistic regression on them; vitlab's first stage
alone, without its report; `vitlab finetune`; and all weights by SGD from a head of zeros. CPU seconds are counted, with
those of child processes, until the classifier is there; testing is not. A finished row is not repeated.

Twenty-four cells of twice ten minutes are a working day on a laptop. `--pace S` imitates one instead, on any device:
both kinds of fine-tuning are as long as a machine has time for that needs S seconds for the forward pass of an image
(`image` in a run's stages.json), testing left out.
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
import torch

from vitlab.data.open import open_data
from vitlab.data.source import Data
from vitlab.finetuning.budget import BATCH, TRAIN, Budget
from vitlab.finetuning.plan import Plan, make_plan
from vitlab.training.recipe import evaluations

Test = Callable[[], dict[str, float]]  # a fitted classifier's accuracy on the test images, and more
START = 12.0  # seconds until the first image is read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", help="a timm ViT's weights, such as vit_tiny_patch16_224.safetensors")
    parser.add_argument("sets", nargs="+", help="data sets; pets:10 uses ten training images of each class")
    parser.add_argument("--model", default="vit_tiny_patch16_224", help="its name in timm")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--pace", type=float, help="seconds an image; see above")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--others", help="a set of other images, which should be refused")
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
                    print(row | result, flush=True)
                    with given.out.open("a") as file:
                        file.write(json.dumps(row | result) + "\n")


def run_row(given: Any, row: dict[str, Any]) -> dict[str, Any]:
    """The test accuracy of one row, with the wall and CPU seconds of its training."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        test = ROWS[row["what"]](given, row, Path(folder))
        used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        cpu = sum(each.ru_utime + each.ru_stime for each in used)
        seconds = time.monotonic() - began
        return {**test(), "seconds": round(seconds, 1), "cpu": round(cpu, 1)}


def spec_of(row: dict[str, Any]) -> tuple[str, int | None]:
    name, _, count = row["set"].rpartition(":")
    return (name, int(count)) if name and count.isdigit() else (row["set"], None)


def open_set(row: dict[str, Any]) -> Data:
    spec, count = spec_of(row)
    return open_data(spec, seed=row["seed"], per_class=count)


def pairs_of(given: Any, row: dict[str, Any]) -> list[str]:
    count = spec_of(row)[1]
    return [f"seed={row['seed']}", f"device={given.device}", *([f"per_class={count}"] if count else [])]


def plan_of(given: Any, row: dict[str, Any]) -> Plan:
    plan = make_plan(spec_of(row)[0], given.weights, pairs_of(given, row), None)
    assert plan is not None
    return plan


def logistic_regression(given: Any, row: dict[str, Any], folder: Path) -> Test:
    """What a friend would write: timm's features of the center crops, scikit-learn's logistic regression."""
    from sklearn.linear_model import LogisticRegression

    timm: Any = import_module("timm")  # has few types
    data = open_set(row)
    model = timm.create_model(given.model, checkpoint_path=given.weights).eval().to(given.device)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))

    def features(source: Any) -> Any:
        rows = []
        with torch.no_grad():
            for start in range(0, len(source), 32):
                part = range(start, min(start + 32, len(source)))
                images = torch.stack([transform(source.image(i).convert("RGB")) for i in part]).to(given.device)
                rows.append(model.forward_head(model.forward_features(images), pre_logits=True).cpu().numpy())
        return np.concatenate(rows)

    fitted = LogisticRegression(max_iter=1000).fit(features(data.train), data.train.labels)
    return lambda: {"accuracy": float(fitted.score(features(data.test), data.test.labels))}


def first_stage(given: Any, row: dict[str, Any], folder: Path) -> Test:
    """The first stage of `vitlab finetune`, without a report."""
    from vitlab.evaluation.extract import extract
    from vitlab.finetuning.head import fit_heads, frozen_features

    plan = plan_of(given, row)
    features = frozen_features(plan.model, plan.data, folder, {"device": given.device})
    heads = fit_heads(features, len(plan.data.classes))

    def test() -> dict[str, float]:
        found = extract(plan.model, plan.data.test, device=given.device)
        return {"accuracy": float((heads.final.guesses(found.values) == found.labels).mean())}

    return test


def staged(given: Any, row: dict[str, Any], folder: Path) -> Test:
    """`vitlab finetune`, by its clock or at a pace."""
    if given.pace is None:
        return command(given, row, folder, "--minutes", str(given.minutes))
    data = plan_of(given, row).data
    held = 0 if data.validation is None else len(data.validation)
    spent = START + given.pace * (len(data.train) + held)
    free = given.pace * len(data.test)  # testing is left out
    steps = Budget(60 * given.minutes + free, given.pace).steps(data, len(data.train) + held, spent, BATCH)
    return command(given, row, folder, f"steps={steps}") if steps else first_stage(given, row, folder)


def plain(given: Any, row: dict[str, Any], folder: Path) -> Test:
    """All weights from a head of zeros, as long as the time allows: what `vitlab finetune` did before."""
    if given.pace is None:
        return command(given, row, folder, "--paper")
    data = plan_of(given, row).data
    held = 0 if data.validation is None else len(data.validation)
    left = (60 * given.minutes - START) / given.pace
    seen = (left - evaluations(int(left / TRAIN), held) * held) / TRAIN
    steps = int(min(seen, max(8_000, 12 * len(data.train))) // BATCH)
    recipe = f"batch={BATCH} optimizer=sgd lr=0.01 clip=1 area=0.3,1 image_size=224"
    return command(given, row, folder, "--paper", *recipe.split(), f"steps={steps}", f"warmup={steps // 10}")


def command(given: Any, row: dict[str, Any], folder: Path, *words: str) -> Test:
    """Run `vitlab finetune`; test it, and what it refuses: false refusals, and images of another set."""
    from vitlab.evaluation.evaluate import evaluate
    from vitlab.evaluation.extract import extract
    from vitlab.evaluation.unknown import auroc
    from vitlab.weights import load

    own = ["finetune", spec_of(row)[0], "--weights", given.weights, "--out", f"{folder}/run", *words]
    program = "from vitlab.cli import main; main()"
    subprocess.run([sys.executable, "-c", program, *own, *pairs_of(given, row)], check=True, stdout=sys.stderr)

    def test() -> dict[str, float]:
        model = load(f"{folder}/run")
        found = evaluate(model, open_set(row).test, device=given.device)
        result = {"accuracy": found.top1.value, "calibration error": found.calibration_error.value}
        if found.distances is not None and model.card.unknown is not None:
            result["refused"] = float((found.distances > 1).mean())
            if given.others is not None:
                others = extract(model, open_data(given.others).test, device=given.device).values
                strange = model.card.unknown.distances(torch.from_numpy(others)).double().numpy()
                result["auroc"] = auroc(found.distances, strange)
        return result

    return test


ROWS: dict[str, Callable[[Any, dict[str, Any], Path], Test]] = {
    "logistic regression": logistic_regression,
    "first stage": first_stage,
    "finetune": staged,
    "plain": plain,
}

if __name__ == "__main__":
    main()
