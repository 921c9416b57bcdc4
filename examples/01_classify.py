"""Load a model and classify a photo.

python examples/01_classify.py                                         # a small digits model, trained in seconds
python examples/01_classify.py google/vit-base-patch16-224 photo.jpg   # a model of the hub and your photo
"""

import sys
from pathlib import Path

from quick_run import train_digits

import vitlab


def main(model: str, photo: str) -> None:
    prediction = vitlab.Classifier(model).predict(photo, top=5)
    for label, probability in prediction.top:
        print(f"{probability:6.1%}  {label}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        main(*sys.argv[1:])
    else:
        run = train_digits(Path("runs/example"))
        main(str(run), str(run / "sample.png"))
