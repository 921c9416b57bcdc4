"""Load a model and classify a photo.

python examples/01_classify.py                                         # a small digits model, trained in seconds
python examples/01_classify.py google/vit-base-patch16-224 photo.jpg   # a model of the hub and your photo
"""

import sys
from pathlib import Path

from PIL import Image
from quick_run import train_digits

import vitlab


def main(model: str, photo: str) -> None:
    classifier = vitlab.Classifier(model)
    pixels = classifier.pixels(Image.open(photo).convert("RGB"))  # (3, height, width), as in evaluation
    probabilities = classifier.probabilities(pixels[None])[0]  # (classes,)
    for index in probabilities.argsort(descending=True)[:5].tolist():
        print(f"{probabilities[index]:6.1%}  {classifier.labels[index]}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        main(*sys.argv[1:])
    else:
        run = train_digits(Path("runs/example"))
        main(str(run), str(run / "sample.png"))
