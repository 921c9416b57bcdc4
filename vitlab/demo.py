"""`vitlab demo`: the five steps on a handwritten digit, then a small ViT trained on all of them, on any CPU."""

import math
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.columns import Columns
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor

from vitlab.config import UserError
from vitlab.models.variants import create
from vitlab.models.vit import ViT

SEED = 0
STEPS = 1000
BATCH = 128
RATE = 2e-3
WARMUP = 100


@dataclass(frozen=True)
class Digits:
    """Scikit-learn's 1,797 handwritten digits, 8x8, as RGB in [-1, 1]; a third of each class is held out."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def load_digits() -> Digits:
    try:
        from sklearn import datasets
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise UserError("the demo's digits come with scikit-learn: pip install 'vitlab[demo]'") from None
    found = datasets.load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1) / 8 - 1
    labels = torch.tensor(found.target)
    train, test = train_test_split(range(len(labels)), test_size=1 / 3, stratify=labels, random_state=SEED)
    return Digits(images[train], labels[train], images[test], labels[test])


def run(console: Console) -> float:
    """Show the steps, train, test; returns the accuracy on the held-out third."""
    torch.manual_seed(SEED)
    digits = load_digits()
    model = create("Ti/2", image_size=8, classes=10, depth=6, width=96, mlp=192, heads=4, dropout=0.1)
    assert isinstance(model, ViT)
    show_steps(console, model, digits.test[:1])
    start = time.perf_counter()
    train(console, model, digits)
    accuracy, guesses = test(model, digits)
    console.print(
        f"test accuracy [bold]{accuracy:.2%}[/] on {len(guesses)} digits never trained on, "
        f"after {time.perf_counter() - start:.0f} s",
        highlight=False,
    )
    show_mistakes(console, digits, guesses)
    return accuracy


@torch.no_grad()
def show_steps(console: Console, model: ViT, image: Tensor) -> None:
    table = Table("step", "what happens", "shape", title="A digit's way through the Vision Transformer")
    patches = model.patches(image)
    tokens = model.eval().tokens(image)
    size, (h, w) = model.config.patch, model.config.grid
    shape = lambda x: " x ".join(map(str, x.shape[1:]))  # noqa: E731
    table.add_row("", "the image: RGB, height, width", shape(image))
    table.add_row("1", f"cut into {h} x {w} patches of {size} x {size} pixels", f"{h * w} x {3 * size * size}")
    table.add_row("2", "project each patch to a token", shape(patches))
    table.add_row("3", "put a class token first, add positions", shape(tokens))
    table.add_row("4", f"{model.config.depth} encoder blocks: attend, then think", shape(tokens))
    table.add_row("5", "classify the class token", shape(model(image)))
    console.print(table)


def train(console: Console, model: ViT, digits: Digits) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.05)
    columns = (TextColumn("training"), BarColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
    model.train()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=STEPS, note="")
        for step in range(STEPS):
            for group in optimiser.param_groups:
                group["lr"] = learning_rate(step)
            pick = torch.randint(len(digits.train), (BATCH,))
            logits = model(shifted(digits.train[pick]))
            labels = digits.train_labels[pick]
            loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            right = (logits.argmax(-1) == labels).float().mean()
            progress.update(task, advance=1, note=f"loss {loss.item():.3f}  accuracy {right.item():.0%}")


def learning_rate(step: int) -> float:
    """Linear warm-up, then half a cosine to zero."""
    warm = min(1.0, (step + 1) / WARMUP)
    return RATE * warm * 0.5 * (1 + math.cos(math.pi * step / STEPS))


def shifted(images: Tensor) -> Tensor:
    """Each image moved by up to a pixel each way: nine digits for one."""
    padded = F.pad(images, (1, 1, 1, 1), value=-1.0)
    moves = torch.randint(0, 3, (len(images), 2))
    return torch.stack([x[:, dy : dy + 8, dx : dx + 8] for x, (dy, dx) in zip(padded, moves.tolist(), strict=True)])


@torch.no_grad()
def test(model: ViT, digits: Digits) -> tuple[float, Tensor]:
    guesses = model.eval()(digits.test).argmax(-1)
    return (guesses == digits.test_labels).float().mean().item(), guesses


def show_mistakes(console: Console, digits: Digits, guesses: Tensor) -> None:
    wrong = (guesses != digits.test_labels).nonzero()[:, 0].tolist()
    if wrong:
        console.print(f"its {len(wrong)} mistakes:")
    cards = [
        Text.assemble(picture(digits.test[i]), f"a {digits.test_labels[i]}, taken for {guesses[i]}") for i in wrong
    ]
    console.print(Columns(cards, padding=(1, 3)))


def picture(image: Tensor) -> Text:
    """An image in the terminal, a character per pixel pair: the upper half block in two colours."""
    grey = ((image[0] + 1) * 127.5).int().tolist()
    text = Text()
    for top, bottom in zip(grey[::2], grey[1::2], strict=True):
        for a, b in zip(top, bottom, strict=True):
            text.append("▀", f"rgb({a},{a},{a}) on rgb({b},{b},{b})")
        text.append("\n")
    return text
