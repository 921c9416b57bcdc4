"""`vitlab demo`: the five steps on a handwritten digit, then a small ViT trained on all of them, on any CPU."""

import tempfile
from pathlib import Path

import torch
from rich.columns import Columns
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from vitlab.data.loader import Batch, EvalLoader
from vitlab.data.sources import Data, open_data
from vitlab.models.vit import ViT
from vitlab.recipes import find
from vitlab.training.loop import train
from vitlab.training.progress import duration
from vitlab.weights import load, preprocess_of

MOST_SHOWN = 12


def run(console: Console, out: Path | None = None) -> float:
    """Train, test, and show the steps and the mistakes; returns the accuracy on the held-out third."""
    recipe = find("digits").recipe
    data = open_data(recipe.data, seed=recipe.seed)
    with tempfile.TemporaryDirectory() as spare:
        folder = out or Path(spare) / "digits"
        console.print(f"training a small ViT on {len(data.train)} handwritten digits of 8x8 pixels")
        outcome = train(recipe, folder, console=console, data=data)
        model = load(folder)
    assert isinstance(model, ViT)
    tests = read_all(model, data)
    guesses = predict(model, tests.images)
    right = (guesses == tests.labels).float().mean().item()
    console.print(
        f"test accuracy [bold]{right:.2%}[/] on {len(guesses)} digits it never saw, after {duration(outcome.seconds)}",
        highlight=False,
    )
    show_mistakes(console, tests, guesses)
    show_steps(console, model, tests.images[:1])
    if out is not None:
        console.print(f"the model is in {out}", highlight=False, markup=False)
    return right


def read_all(model: ViT, data: Data) -> Batch:
    """The whole test set, as one batch."""
    loader = EvalLoader(data.test, model.config.image_size, preprocess_of(model), batch=len(data.test))
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
