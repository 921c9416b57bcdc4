"""`vitlab demo`: train a small ViT on handwritten digits, on any CPU, and show its predictions and mistakes.

The run's folder also gets digits as files, to try the other commands on: samples/, one of each, and photos/, with one
folder per class. All of them are from the test set. Last comes a photo, which the model in the box classifies.
"""

from pathlib import Path

import numpy as np
import torch
from rich.columns import Columns
from rich.table import Table
from rich.text import Text
from torch import Tensor

from vitlab.analysis.gallery import Gallery
from vitlab.data.loader import Batch, EvalLoader
from vitlab.data.open import open_data
from vitlab.data.source import ImageSource
from vitlab.errors import UserError
from vitlab.files import write_errors
from vitlab.models.vit import ViT
from vitlab.prediction.files import predict_files
from vitlab.terminal import Terminal
from vitlab.training.recipe import Recipe
from vitlab.training.recipes import find
from vitlab.training.setup import read_recipe
from vitlab.weights import box, load
from vitlab.weights.formats.vitlab import WEIGHTS

MOST_SHOWN = 12
PHOTOS = 20  # files of each digit
NEXT = (
    ("vitlab finetune photos/ --weights google/vit-base-patch16-224 --out runs/mine", "photos/: one folder per class"),
    ("vitlab predict runs/mine photo.jpg", "the class of an image; without runs/mine, by the small model in vitlab"),
    ("vitlab serve runs/mine", "a web page to drop images on"),
)


def begin(console: Terminal, out: Path) -> tuple[Recipe, bool]:
    """The recipe, and whether there is a run in `out` to resume."""
    recipe = find("digits").recipe
    images = len(open_data(recipe.data, seed=recipe.seed).train)
    resume = read_recipe(out) is not None
    action = "resuming training of" if resume else "training"
    line = f"{action} a small ViT on {images:,} handwritten digits of 8x8 pixels"
    if resume and (out / WEIGHTS).exists():
        line = f"{out} already has the demo's model, which is used (remove the folder to train again)"
    console.print(line, soft_wrap=True)
    return recipe, resume


def show(console: Terminal, out: Path) -> None:
    """Show what the finished run in `out` predicts, and write samples and figures to its folder."""
    data = open_data(find("digits").recipe.data)
    model = load(out)
    assert isinstance(model, ViT)
    size, preprocess = model.config.image_size, model.card.preprocess
    tests = next(EvalLoader(data.test, size, preprocess, batch=len(data.test)).batches())
    samples = out / "samples"
    show_mistakes(console, model, tests)
    show_steps(console, model, tests.images[:1], "a digit")
    write_digits(data.test, out)
    console.print(f"\nvitlab predict {out} {samples}", soft_wrap=True)
    predict_files(str(out), [str(samples)], kind="table")
    try:
        Gallery(model, out / "inside", ("positions", "classes", "steps")).write([samples / "3.png"], lambda line: None)
    except UserError as error:  # matplotlib is optional
        console.print(f"no figures: {error}", soft_wrap=True)
    show_photo(console, out)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("report.html", "training curves, accuracy, mistakes: open it in a browser")
    table.add_row("inside/", "the evidence for each class, and the five steps, as images")
    if box.is_there():
        table.add_row(box.PHOTO.name, "a photo to try `vitlab predict` and `vitlab serve` on, without a model")
    table.add_row("photos/, samples/", "digits to try the other commands on, as in docs/tutorial.md")
    console.print(f"\nin {out}:", table, sep="\n")
    console.print("\nNext, with your own photos:", style="bold")
    for command, what in NEXT:
        console.print(f"  {command}   [dim]# {what}[/]", markup=True, soft_wrap=True)


def show_photo(console: Terminal, out: Path) -> None:
    """Show what the model in the box finds in the photo of the package, and its five steps, also as figures."""
    if not box.is_there():
        console.print("\nno photo: this copy of vitlab has no model in the box", soft_wrap=True)
        return
    photo, model = out / box.PHOTO.name, load(box.NAME)
    with write_errors(photo):
        photo.write_bytes(box.PHOTO.read_bytes())
    console.print(f"\nvitlab predict {photo}", soft_wrap=True)
    predict_files(box.NAME, [str(photo)], kind="table", look=out / "inside")
    assert isinstance(model, ViT)
    show_steps(console, model, model.preprocess(photo), "a photo")
    try:
        Gallery(model, out / "inside", ("classes", "steps")).write([photo], lambda line: None)
    except UserError as error:
        console.print(f"no figures: {error}", soft_wrap=True)


# ---- digits as files


def write_digits(source: ImageSource, out: Path) -> None:
    """Write one file of each digit to samples/ and twenty others to photos/."""
    with write_errors(out):
        for label, name in enumerate(source.classes):
            first, *others = np.flatnonzero(source.labels == label)[: PHOTOS + 1].tolist()
            (out / "samples").mkdir(exist_ok=True)
            source.image(first).save(out / "samples" / f"{name}.png")
            folder = out / "photos" / name
            folder.mkdir(parents=True, exist_ok=True)
            for number, index in enumerate(others, 1):
                source.image(index).save(folder / f"{number:02}.png")


# ---- in the terminal


@torch.no_grad()
def show_steps(console: Terminal, model: ViT, image: Tensor, what: str) -> None:
    def shape(x: Tensor) -> str:
        return " x ".join(map(str, x.shape[1:]))

    size, (h, w) = model.config.patch, model.config.grid
    tokens, logits = model.tokens(image), model(image)
    prefix = "put a class token first, " if model.config.token else ""
    pooled = "class token" if model.config.pool == "token" else "pooled tokens"
    guess = model.labels[int(logits.argmax())]
    table = Table("step", f"what happens to {what}", "shape", title="The five steps of the Vision Transformer")
    table.add_row("", "the image: RGB, height, width", shape(image))
    table.add_row("1", f"cut into {h} x {w} patches of {size} x {size} pixels", f"{h * w} x {3 * size * size}")
    table.add_row("2", "project each patch to a token", shape(model.patches(image)))
    table.add_row("3", f"{prefix}add positions", shape(tokens))
    table.add_row("4", f"{model.config.depth} encoder blocks: attention, then MLP", shape(tokens))
    table.add_row("5", f"classify the {pooled}: the prediction is {guess}", shape(logits))
    console.print(table)


@torch.no_grad()
def show_mistakes(console: Terminal, model: ViT, tests: Batch) -> None:
    guesses = model(tests.images).argmax(-1)
    wrong = (guesses != tests.labels).nonzero()[:, 0].tolist()
    if not wrong:
        return
    console.print(f"its {len(wrong)} mistakes:" if len(wrong) <= MOST_SHOWN else f"{MOST_SHOWN} of its mistakes:")
    cards = []
    for i in wrong[:MOST_SHOWN]:
        caption = f"a {tests.labels[i]}, taken for {guesses[i]}"
        cards.append(Text.assemble(image_text(tests.images[i]), caption) if console.color_system else Text(caption))
    console.print(Columns(cards, padding=(0, 3)))


def image_text(image: Tensor) -> Text:
    """An image for the terminal: each half block in two shades of gray is two pixels."""
    gray = ((image[0] + 1) * 127.5).round().clamp(0, 255).int().tolist()
    text = Text()
    for top, bottom in zip(gray[::2], gray[1::2], strict=True):
        for a, b in zip(top, bottom, strict=True):
            text.append("▀", f"rgb({a},{a},{a}) on rgb({b},{b},{b})")
        text.append("\n")
    return text
