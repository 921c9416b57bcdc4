"""`vitlab demo`: train a small ViT on handwritten digits, on any CPU, and show its predictions and mistakes.

The run's folder also gets digits as files, to try the other commands on: samples/, one of each, and photos/, with one
folder per class. All of them are from the test set.
"""

from pathlib import Path

import numpy as np
import torch
from rich.columns import Columns
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from vitlab.analysis.gallery import Gallery
from vitlab.data.loader import Batch, EvalLoader
from vitlab.data.open import open_data
from vitlab.data.source import ImageSource
from vitlab.errors import UserError
from vitlab.models.vit import ViT
from vitlab.predict.files import predict_files
from vitlab.training.recipe import Recipe
from vitlab.training.recipes import find
from vitlab.training.setup import read_recipe
from vitlab.weights import load
from vitlab.weights.formats.vitlab import WEIGHTS

MOST_SHOWN = 12
PHOTOS = 20  # files of each digit
FIGURES = ("positions", "rollout", "steps")
NEXT = (
    ("vitlab finetune photos/ --weights google/vit-base-patch16-224 --out runs/mine", "photos/: one folder per class"),
    ("vitlab predict runs/mine photo.jpg", "the class of an image"),
    ("vitlab serve runs/mine", "a web page to drop images on"),
)


def begin(console: Console, out: Path) -> tuple[Recipe, bool]:
    """The recipe, and whether there is a run in `out` to resume."""
    recipe = find("digits").recipe
    images = len(open_data(recipe.data, seed=recipe.seed).train)
    resume = read_recipe(out) is not None
    if resume and (out / WEIGHTS).exists():
        print_line(console, f"{out} already has the demo's model, which is used (remove the folder to train again)")
    else:
        action = "resuming training of" if resume else "training"
        print_line(console, f"{action} a small ViT on {images:,} handwritten digits of 8x8 pixels")
    return recipe, resume


def show(console: Console, out: Path) -> None:
    """Show what the finished run in `out` predicts, and write samples and figures to its folder."""
    data = open_data(find("digits").recipe.data)
    model = load(out)
    assert isinstance(model, ViT)
    size, preprocess = model.config.image_size, model.card.preprocess
    tests = next(EvalLoader(data.test, size, preprocess, batch=len(data.test)).batches())
    show_mistakes(console, model, tests)
    show_steps(console, model, tests.images[:1])
    write_digits(data.test, out)
    print_line(console, f"\nvitlab predict {out} {out / 'samples'}")
    predict_files(str(out), [str(out / "samples")], kind="table")
    try:
        Gallery(model, out / "inside", FIGURES).write([out / "samples" / "3.png"], lambda line: None)
    except UserError as error:  # matplotlib is optional
        print_line(console, f"no figures: {error}")
    show_end(console, out)


def show_end(console: Console, out: Path) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("report.html", "training curves, accuracy, mistakes: open it in a browser")
    table.add_row("inside/", "attention, and the five steps as images")
    table.add_row("photos/, samples/", "digits to try the other commands on, as in docs/tutorial.md")
    console.print(f"\nin {out}:", highlight=False)
    console.print(table, highlight=False)
    console.print("\nNext, with your own photos:", style="bold", highlight=False)
    for command, what in NEXT:
        console.print(f"  {command}   [dim]# {what}[/]", highlight=False, markup=True, soft_wrap=True)


def print_line(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


# ---- digits as files


def write_digits(source: ImageSource, out: Path) -> None:
    """Write one file of each digit to samples/ and twenty others to photos/."""
    try:
        for label, name in enumerate(source.classes):
            first, *others = np.flatnonzero(source.labels == label)[: PHOTOS + 1].tolist()
            (out / "samples").mkdir(exist_ok=True)
            source.image(first).save(out / "samples" / f"{name}.png")
            folder = out / "photos" / name
            folder.mkdir(parents=True, exist_ok=True)
            for number, index in enumerate(others, 1):
                source.image(index).save(folder / f"{number:02}.png")
    except OSError as error:
        raise UserError(f"the digits cannot be written to {out}: {error.strerror or error}") from None


# ---- in the terminal


@torch.no_grad()
def show_steps(console: Console, model: ViT, image: Tensor) -> None:
    def shape(x: Tensor) -> str:
        return " x ".join(map(str, x.shape[1:]))

    size, (h, w) = model.config.patch, model.config.grid
    tokens, logits = model.tokens(image), model(image)
    table = Table("step", "what happens to a digit", "shape", title="The five steps of the Vision Transformer")
    table.add_row("", "the image: RGB, height, width", shape(image))
    table.add_row("1", f"cut into {h} x {w} patches of {size} x {size} pixels", f"{h * w} x {3 * size * size}")
    table.add_row("2", "project each patch to a token", shape(model.patches(image)))
    table.add_row("3", "put a class token first, add positions", shape(tokens))
    table.add_row("4", f"{model.config.depth} encoder blocks: attention, then MLP", shape(tokens))
    table.add_row("5", f"classify the class token: the prediction is {logits.argmax()}", shape(logits))
    console.print(table)


@torch.no_grad()
def show_mistakes(console: Console, model: ViT, tests: Batch) -> None:
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
