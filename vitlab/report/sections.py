"""The page's parts as HTML. Every word from outside (names of classes, files, settings) goes through `safe`."""

import html
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vitlab.cost import Cost
from vitlab.data.source import Data
from vitlab.evaluation.result import Evaluation
from vitlab.models.config import ModelConfig, ResNetConfig
from vitlab.plots.scores import COUNTED
from vitlab.report.describe import build_of, count, how, many, model_name, moment, share
from vitlab.report.history import History
from vitlab.report.images import Drawn, Mistake
from vitlab.settings import to_json

FOLDED = 15  # classes from which their table is folded
PAIRS = 8  # confused pairs beside the matrix; where there is no matrix, all that are kept
FEW = 100  # test images below which a rate is a rough one

Heard = Callable[[int], None]


@dataclass(frozen=True)
class Subject:
    """What the report is about; `data` is what the model was tested on, `size` that of its file."""

    run: str
    history: History
    config: ModelConfig
    data: Data
    cost: Cost
    size: int


@dataclass(frozen=True)
class Tested:
    found: Evaluation
    seconds: float


# ---- pieces


def safe(value: object) -> str:
    """Text for a page; names of files need not be text."""
    return html.escape(str(value).encode("utf-8", "replace").decode())


def section(title: str, *parts: str, about: str = "") -> str:
    said = f'<p class="about">{about}</p>' if about else ""
    return f"<section>\n<h2>{title}</h2>\n{said}{''.join(parts)}\n</section>"


def picture(figure: Drawn | None, alt: str, kind: str = "") -> str:
    if figure is None:
        return ""
    return (
        f'<div class="figure {kind}" style="--wide:{figure.width}px"><picture>'
        f'<source media="screen and (prefers-color-scheme: dark)" srcset="{figure.dark}">'
        f'<img src="{figure.light}" width="{figure.width}" height="{figure.height}" alt="{safe(alt)}">'
        "</picture></div>"
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Cells are HTML; all but the first are numbers, unless `kind` says otherwise."""
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """Terms and what they are; cells are HTML."""
    return '<dl class="facts">' + "".join(f"<div><dt>{a}</dt><dd>{b}</dd></div>" for a, b in rows) + "</dl>"


def folded(summary: str, inner: str, kind: str) -> str:
    return f'<details class="{kind}"><summary>{summary}</summary>{inner}</details>'


# ---- the top: what it is, and how good


def top(subject: Subject, tested: Tested | None) -> str:
    h, config = subject.history, subject.config
    parameters = count(subject.cost.parameters)
    verb = f"fine-tuned from {safe(h.recipe.weights)}" if h.recipe.weights else "trained from scratch"
    what = f"A {safe(model_name(config))} with {parameters} parameters, {verb} on {many(h.images, 'image')}"
    name = f"<h1>{safe(subject.run)}</h1>"
    if tested is None:
        said = "by predicting masked patches. It has no classes of its own: it is a start to fine-tune from."
        return f'<header>{name}<p class="lede">{what} {said}</p></header>'
    found = tested.found
    right, n = int((found.guesses == found.labels).sum()), len(found.labels)
    lede = f"{what} of {many(config.classes, 'class')}. It gets {right:,} of {many(n, 'test image')} right."
    return f'<header>{name}<p class="lede">{lede}</p>{tiles(found)}{doubt(right, n)}</header>'


def tiles(found: Evaluation) -> str:
    wrong, n = int((found.guesses != found.labels).sum()), len(found.labels)
    bounds = bound(n - wrong, n) if wrong in (0, n) else span(found.top1.low, found.top1.high)
    rows = [tile("accuracy", share(found.top1.value), bounds, meter(found))]
    if found.top5 is not None:
        rows.append(tile("among its first five", share(found.top5.value), span(found.top5.low, found.top5.high)))
    rows.append(tile("mistakes", f"{wrong:,}", f"of {many(n, 'test image')}"))
    sure = share(float(found.confidence.mean()))
    rows.append(tile("mean confidence", sure, f"calibration error {share(found.calibration_error.value)}"))
    return f'<dl class="tiles">{"".join(rows)}</dl>'


def tile(name: str, value: str, under: str, extra: str = "") -> str:
    return f'<div><dt>{name}</dt><dd class="big">{value}</dd><dd class="small">{under}</dd>{extra}</div>'


def span(low: float, high: float) -> str:
    return "" if low == high else f"{100 * low:.1f} to {100 * high:.1f} %"


def meter(found: Evaluation) -> str:
    """The interval on a line from 0 to 100 %."""
    low, high, at = (100 * x for x in (found.top1.low, found.top1.high, found.top1.value))
    return (
        f'<dd class="meter" aria-hidden="true"><span style="left:{low:.2f}%;right:{100 - high:.2f}%"></span>'
        f'<i style="left:{at:.2f}%"></i></dd>'
    )


def bound(right: int, n: int) -> str:
    """What is known of the rate where all or none are right."""
    limit = 0.05 ** (1 / n)  # the rate at which all of n are right once in twenty times
    return f"at least {share(limit)}" if right else f"at most {share(1 - limit)}"


def doubt(right: int, n: int) -> str:
    """What the interval means, in words; where all or none are right, resampling has nothing to say."""
    if 0 < right < n:
        said = (
            "The interval says how far chance, in the choice of test images, may have moved the accuracy (95\u00a0%)."
        )
    else:
        said = f"All {n:,} are {'right' if right else 'wrong'}, so with 95 % confidence it is {bound(right, n)}."
    if n < FEW:
        said += f" {many(n, 'image')} are few: more test images would say more."
    return f'<p class="about">{said}</p>'


# ---- how it was made


def made(subject: Subject) -> str:
    h, config, data = subject.history, subject.config, subject.data
    recipe = h.recipe
    rows = [
        ("model", f"{safe(model_name(config))}: {build_of(config)}"),
        ("started from", f"<code>{safe(recipe.weights)}</code>" if recipe.weights else "random weights"),
        ("trained on", f"<code>{safe(recipe.data)}</code>: {many(h.images, 'image')}"),
        ("tested on", f"{safe(data.name)}: {many(len(data.test), 'image')}; {safe(data.note)}"),
        ("recipe", safe(how(recipe, h.images))),
    ]
    said = to_json(recipe)
    if recipe.weights is not None:
        del said["model"]  # the weights decide
    said |= {f"augment: {key}": value for key, value in said.pop("augment").items()}
    said |= {f"preprocess: {key}": value for key, value in (said.pop("preprocess") or {}).items()}
    settings = ((safe(key), safe(shown(value))) for key, value in said.items() if value is not None)
    return section(
        "What was trained on what",
        pairs(rows),
        folded("All settings", table(("setting", "value"), settings, "words"), "settings"),
    )


def shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def course(subject: Subject, figures: dict[str, Drawn]) -> str:
    h = subject.history
    if not {"loss", "accuracy"} & figures.keys():
        return ""
    final = f", at the end {h.loss[-1]:.3g}" if len(h.loss) else ""
    tested = h.accuracy if h.averaged is None else h.averaged
    best = f"{share(float(tested[-1]))} at the end" if len(tested) else ""
    rate = h.recipe.lr
    return section(
        "How it learned",
        '<div class="trio">',
        picture(figures.get("loss"), f"Training loss by step{final}."),
        picture(figures.get("accuracy"), f"Test accuracy by step, {best}."),
        picture(figures.get("rate"), f"Learning rate by step, {rate:g} at its highest."),
        "</div>",
    )


# ---- how good it is


def confusions(found: Evaluation, figure: Drawn | None) -> str:
    confused = found.confused if figure is None else found.confused[:PAIRS]
    if not confused:
        about = "No class was taken for another."
        return section("What it takes for what", picture(figure, about, "matrix"), about=about)
    rows = ((f"{safe(truth)} <span>taken for</span> {safe(guess)}", f"{n:,}") for truth, guess, n in confused)
    most = table(("most often", "images"), rows, "confused")
    (truth, guess, n), *_ = confused
    alt = f"Confusion matrix of {len(found.names)} classes. Most often, {n} times, {truth} was taken for {guess}."
    about = "" if figure is None else "A row is what the image shows, a column what the model said."
    both = f"{picture(figure, alt, 'matrix')}<div>{most}</div>"
    few = figure is not None and len(found.names) <= COUNTED
    return section("What it takes for what", f'<div class="{"split" if few else ""}">{both}</div>', about=about)


def mistakes(found: Evaluation, shown: list[Mistake]) -> str:
    wrong = int((found.guesses != found.labels).sum())
    if not shown:
        return ""
    title = "Its mistakes" if wrong <= len(shown) else f"The {len(shown)} mistakes it was surest of"
    about = "Each picture as the model saw it"
    if shown[0].looked is not None:
        about += ", and where it looked: attention rollout, bright where it looked most"
    about += ". Some may be labels to mend rather than mistakes."
    return section(title, '<div class="cards">', *(card(one) for one in shown), "</div>", about=about)


def card(one: Mistake) -> str:
    names = f"{one.truth} taken for {one.guess}"
    images = f'<img src="{one.picture}" alt="{safe(names)}">'
    if one.looked is not None:
        images += f'<img src="{one.looked}" alt="where the model looked">'
    return (
        f'<figure class="card"><div class="pair">{images}</div><figcaption>'
        f'<b>{safe(one.truth)}</b> <span>taken for</span> <b class="bad">{safe(one.guess)}</b>, '
        f'{share(one.confidence)} sure<br><span class="file">{safe(one.file)}</span></figcaption></figure>'
    )


def classes(found: Evaluation) -> str:
    rows = []
    for row in found.class_table():
        bounded = 0 < row["correct"] < row["images"]  # else resampling has nothing to say
        low_high = f"{100 * row['recall_low']:.0f} to {100 * row['recall_high']:.0f}" if bounded else "-"
        recall, precision = ("-" if row[key] is None else f"{row[key]:.1%}" for key in ("recall", "precision"))
        bar = f'<span class="bar"><i style="width:{100 * (row["recall"] or 0):.1f}%"></i></span><span>{recall}</span>'
        rows.append((safe(row["class"]), f"{row['images']:,}", f"{row['correct']:,}", bar, low_high, precision))
    inner = table(("class", "images", "found", "recall", "95 %", "precision"), rows, "classes")
    if len(rows) > FOLDED:
        inner = folded(f"All {len(rows):,} classes, worst first", inner, "all")
    about = "Recall: the share of a class's images that is found. Precision: the share of its guesses that is right."
    return section("Class by class", inner, about=about)


def confidence(found: Evaluation, figure: Drawn) -> str:
    gap = float(found.confidence.mean()) - found.top1.value
    much = "a little" if abs(gap) < 0.05 else "much"
    words = "about as sure as it may be" if abs(gap) < 0.01 else f"{much} {'too sure' if gap > 0 else 'too modest'}"
    c = found.calibration_error
    sure, right = share(float(found.confidence.mean())), share(found.top1.value)
    about = (
        f"On average it claims {sure} and {right} is right: it is {words}. The calibration error, the mean gap "
        f"between the two over groups of like confidence, is {share(c.value)} ({span(c.low, c.high) or 'no interval'})."
    )
    filled = int(np.count_nonzero(found.calibration.count))
    plot = picture(figure, f"Accuracy by confidence in {many(filled, 'group')}; on the diagonal they agree.", "square")
    said = f'<p class="about">{about}</p>'
    return section("Can its confidence be believed?", f'<div class="split even">{said}{plot}</div>')


# ---- what it cost, what to do next


def cost(subject: Subject, tested: Tested | None) -> str:
    h, c = subject.history, subject.cost
    each = c.forward_flops if h.recipe.freeze == "body" else c.train_flops  # a frozen body has no backward pass
    rows = [
        ("training", f"{moment(h.seconds)} of steps, {h.speed:,.0f} images a second" if h.speed else "not logged"),
        ("operations", f"{count(each * h.seen)}FLOPs in all, {count(c.forward_flops)}FLOPs to classify one image"),
        ("size", f"{count(c.parameters)} parameters, a file of {subject.size / 1e6:.1f} MB"),
    ]
    if tested is not None:
        n = len(tested.found.labels)
        speed = f"{n / max(1e-9, tested.seconds):,.0f} images a second"
        rows.append(("testing", f"{many(n, 'image')} in {moment(tested.seconds)}, {speed} with reading them"))
    return section("What it cost", pairs(rows), about="Time as logged, without the tests along the way.")


def next_steps(subject: Subject) -> str:
    run = shlex.quote(subject.run)
    if subject.config.classes == 0:
        rows = [("teach it your classes", f"vitlab finetune photos/ --weights {run} --out runs/mine")]
    else:
        rows = [
            ("ask it about pictures", f"vitlab predict {run} photo.jpg"),
            ("put it behind a page", f"vitlab serve {run}"),
            ("take it elsewhere", f"vitlab export {run} model.onnx"),
        ]
    if not isinstance(subject.config, ResNetConfig):
        rows.append(("look inside", f"vitlab inspect {run} photo.jpg"))
    if subject.config.classes:
        rows.append(("test it on other images", f"vitlab evaluate {run} other-photos/ --split all"))
    said = "".join(f"<div><dt>{what}</dt><dd><code>{safe(line)}</code></dd></div>" for what, line in rows)
    return section("What to do next", f'<dl class="commands">{said}</dl>')
