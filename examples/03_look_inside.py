"""Draw where a model looks: attention rollout over an image, computed by hand and as the package draws it.

python examples/03_look_inside.py                       # a small digits model, trained in seconds
python examples/03_look_inside.py runs/mine photo.jpg   # your model and photo
"""

import sys
from pathlib import Path

import torch
from PIL import Image
from quick_run import train_digits

import vitlab
from vitlab.analysis.gallery import Gallery
from vitlab.models.vit import ViT


def main(run: str, photo: str, out: str = "inside") -> None:
    classifier = vitlab.Classifier(run, device="cpu")
    model = classifier.model
    assert isinstance(model, ViT)
    pixels = classifier.pixels(Image.open(photo).convert("RGB"))[None]
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (classifier.preprocess.mean, classifier.preprocess.std))
    maps = vitlab.attention(model, (pixels / 255 - mean) / std)  # per layer (1, heads, tokens, tokens)

    flow = torch.eye(maps[0].shape[-1])
    for layer in maps:  # rollout: the residual stream carries half of each token past every layer
        flow = (layer[0].mean(0) + torch.eye(len(flow))) / 2 @ flow
    height, width = model.config.grid
    looks = flow[0, 1:].reshape(height, width)  # from the class token, which is the first, to each patch
    print("share of the most attended patch:", f"{looks.max() / looks.sum():.1%}")

    Gallery(model, Path(out), ("rollout", "heads", "steps")).write([Path(photo)], print)  # the same as PNG and SVG


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main(*sys.argv[1:])
    else:
        folder = train_digits(Path("runs/example"))
        main(str(folder), str(folder / "sample.png"), "runs/example/inside")
