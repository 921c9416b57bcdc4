"""`vitlab demo`: a small ViT learns handwritten digits, on any CPU; then its answers, its mistakes and its insides.

The run's folder gets digits as files beside it, to try the other verbs on: samples/, one of each, and photos/, class
folders as one's own photos would lie. All of them are digits the model never saw.
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
from vitlab.data.source import Data, ImageSource
from vitlab.errors import UserError
from vitlab.models.vit import ViT
from vitlab.predict.files import predict_files
from vitlab.training.recipe import Recipe
from vitlab.training.recipes import find
from vitlab.training.setup import stored_recipe
from vitlab.weights import load
from vitlab.weights.formats.vitlab import WEIGHTS

MOST_SHOWN = 12
PHOTOS = 20  # files of each digit
FIGURES = ("positions", "rollout", "steps")
NEXT = (
    (
        "vitlab finetune photos/ --weights google/vit-base-patch16-224 --out runs/mine",
        "one folder per class in photos/",
    ),
    ("vitlab predict runs/mine photo.jpg", "what is in a picture"),
    ("vitlab serve runs/mine", "a page to drop pictures on"),
)


def begin(console: Console, out: Path) -> tuple[Recipe, bool]:
    """The recipe, and whether there is a run in `out` to go on with."""
    recipe = find("digits").recipe
    images = len(open_data(recipe.data, seed=recipe.seed).train)
    there = stored_recipe(out) is not None
    if there and (out / WEIGHTS).exists():
        say(console, f"{out} holds the demo's model already; it is used as it is (remove the folder to train anew)")
    else:
        verb = "going on training" if there else "training"
        say(console, f"{verb} a small ViT on {images:,} handwritten digits of 8x8 pixels")
    return recipe, there


def tell(console: Console, out: Path) -> None:
    """What the finished run in `out` can do."""
    data = open_data(find("digits").recipe.data)
    model = load(out)
    assert isinstance(model, ViT)
    tests = read_all(model, data)
    guesses = predict(model, tests.images)
    show_mistakes(console, tests, guesses)
    show_steps(console, model, tests.images[:1])
    write_digits(data.test, out)
    say(console, f"\nvitlab predict {out} {out / 'samples'}")
    predict_files(str(out), [str(out / "samples")], kind="table")
    try:
        Gallery(model, out / "inside", FIGURES).write([out / "samples" / "3.png"], lambda line: None)
    except UserError as error:  # matplotlib is an option
        say(console, f"no figures: {error}")
    show_end(console, out)


def show_end(console: Console, out: Path) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("report.html", "how it learned, its mistakes: open it in a browser")
    table.add_row("inside/", "where it looks, and the five steps as pictures")
    table.add_row("photos/, samples/", "digits to try the other verbs on, as in docs/tutorial.md")
    console.print(f"\nin {out}:", highlight=False)
    console.print(table, highlight=False)
    console.print("\nNext, with your own photos:", style="bold", highlight=False)
    for command, what in NEXT:
        console.print(f"  {command}   [dim]# {what}[/]", highlight=False, markup=True, soft_wrap=True)


def say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


# ---- digits as files


def write_digits(source: ImageSource, out: Path) -> None:
    """Of each digit one file in samples/ and twenty others in photos/."""
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


def read_all(model: ViT, data: Data) -> Batch:
    """The whole test set, as one batch."""
    loader = EvalLoader(data.test, model.config.image_size, model.card.preprocess, batch=len(data.test))
    return next(iter(loader.batches()))


@torch.no_grad()
def predict(model: ViT, images: Tensor) -> Tensor:
    return model(images).argmax(-1)


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
    table.add_row("4", f"{model.config.depth} encoder blocks: attend, then think", shape(tokens))
    table.add_row("5", f"classify the class token: it says {logits.argmax()}", shape(logits))
    console.print(table)


def show_mistakes(console: Console, tests: Batch, guesses: Tensor) -> None:
    wrong = (guesses != tests.labels).nonzero()[:, 0].tolist()
    if not wrong:
        return
    console.print(f"its {len(wrong)} mistakes:" if len(wrong) <= MOST_SHOWN else f"{MOST_SHOWN} of its mistakes:")
    cards = []
    for i in wrong[:MOST_SHOWN]:
        words = f"a {tests.labels[i]}, taken for {guesses[i]}"
        cards.append(Text.assemble(picture(tests.images[i]), words) if console.color_system else Text(words))
    console.print(Columns(cards, padding=(0, 3)))


def picture(image: Tensor) -> Text:
    """An image in the terminal: a half block in two greys is two pixels."""
    grey = ((image[0] + 1) * 127.5).round().clamp(0, 255).int().tolist()
    text = Text()
    for top, bottom in zip(grey[::2], grey[1::2], strict=True):
        for a, b in zip(top, bottom, strict=True):
            text.append("▀", f"rgb({a},{a},{a}) on rgb({b},{b},{b})")
        text.append("\n")
    return text
