"""Draw where a model looks: the evidence for a class, and attention rollout, computed by hand and as figures.

python examples/03_look_inside.py                       # a small digits model, trained in seconds
python examples/03_look_inside.py runs/mine photo.jpg   # your model and photo
"""

import sys
from pathlib import Path

import torch
from PIL import Image, ImageOps
from quick_run import train_digits

import vitlab
from vitlab.analysis.class_map import class_map
from vitlab.analysis.gallery import Gallery
from vitlab.models.vit import ViT


def main(run: str, photo: str, out: str = "inside") -> None:
    classifier = vitlab.Classifier(run, device="cpu")
    model = classifier.model
    assert isinstance(model, ViT)
    pixels = classifier.pixels(ImageOps.exif_transpose(Image.open(photo)).convert("RGB"))[None]
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (classifier.preprocess.mean, classifier.preprocess.std))
    images = (pixels / 255 - mean) / std
    label = int(model(images).argmax())
    evidence = class_map(model, images, label)[0]  # (rows, columns), for this class
    row, column = divmod(int(evidence.argmax()), evidence.shape[1])
    print(f"most evidence for {classifier.labels[label]}: row {row + 1}, column {column + 1} of the patches")

    maps = vitlab.attention(model, images)  # per layer (1, heads, tokens, tokens); the same for every class
    flow = torch.eye(maps[0].shape[-1])
    for layer in maps:  # rollout: the residual stream carries half of each token past every layer
        flow = (layer[0].mean(0) + torch.eye(len(flow))) / 2 @ flow
    height, width = model.config.grid
    looks = flow[0, 1:].reshape(height, width)  # from the class token, which is the first, to each patch
    print("share of the most attended patch:", f"{looks.max() / looks.sum():.1%}")

    Gallery(model, Path(out), ("classes", "rollout", "steps")).write([Path(photo)], print)  # as PNG and SVG


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main(*sys.argv[1:])
    else:
        folder = train_digits(Path("runs/example"))
        main(str(folder), str(folder / "sample.png"), "runs/example/inside")
