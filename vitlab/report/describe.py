"""Models, recipes and numbers in plain English."""

from vitlab.data.transforms import Augment
from vitlab.models.config import ModelConfig, ResNetConfig
from vitlab.models.names import name_of
from vitlab.text import duration
from vitlab.training.recipe import Recipe
from vitlab.training.stages import Stages


def model_name(config: ModelConfig) -> str:
    """ViT-B/16 where it is a model of the paper, else its kind."""
    name = name_of(config)
    if isinstance(config, ResNetConfig):
        kind = "axial ResNet" if config.attention == "axial" else "ResNet"
        return f"{kind} {name}" if name else kind
    if config.stem is not None:
        return f"hybrid {name}" if name else "hybrid ViT"
    kind = "axial ViT" if config.attention == "axial" else "ViT"
    return f"{kind}-{name}" if name else kind


def describe_model(config: ModelConfig) -> str:
    """A model's layers and the size of its images."""
    pixels = f"{config.image_size[0]} x {config.image_size[1]} pixels"
    if isinstance(config, ResNetConfig):
        units, stages = plural(sum(config.stages), "unit"), plural(len(config.stages), "stage")
        return f"{units} in {stages}, images of {pixels}"
    h, w = config.grid
    return (
        f"{plural(config.depth, 'layer')} of {plural(config.heads, 'head')}, width {config.width}, "
        f"{h} x {w} patches of images of {pixels}"
    )


def si_number(number: float) -> str:
    """A number to three digits with an SI prefix: 853, 85.8 k, 5.72 M, 1.2 G."""
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.3g}"


def percent(value: float) -> str:
    """A rate with as many digits as it needs: 87.3 %, 100 %; the space does not break."""
    return f"{100 * value:.1f}".removesuffix(".0") + "\u00a0%"


def percent_range(low: float, high: float) -> str:
    """An interval of rates: 85.1 to 89.2 %; empty where it has no width."""
    return "" if low == high else f"{100 * low:.1f} to {100 * high:.1f} %"


def describe_seconds(seconds: float) -> str:
    """A duration, with one more digit below 10 s."""
    return f"{seconds:.1f} s" if seconds < 10 else duration(seconds)


def plural(number: int, noun: str) -> str:
    """1 image, 2 images, 3 classes."""
    more = "es" if noun.endswith("ss") else "s"
    return f"{number:,} {noun}{'' if number == 1 else more}"


def describe_recipe(recipe: Recipe, images: int, steps: int) -> str:
    """A recipe in a few sentences, of so many steps that were done; `images` is the size of the training set."""
    what = "Only the head was trained" if recipe.freeze == "body" else "All weights were trained"
    what = f"Low-rank updates (LoRA, rank {recipe.lora}) and the head were trained" if recipe.lora else what
    kind = {"sgd": "SGD", "adamw": "AdamW", "muon": "Muon"}[recipe.optimizer]
    passes = f"{steps * recipe.batch / max(1, images):.1f}".removesuffix(".0")
    times = "once" if passes == "1" else f"{passes} times"
    decays = {"cosine": ", then cosine decay", "linear": ", then linear decay", "constant": ""}
    decays["wsd"] = ", then linear decay in the last fifth"
    warmup = f", reached over {plural(recipe.warmup, 'step')}" if recipe.warmup else ""
    sentences = [
        f"{what} for {plural(steps, 'step')} of {plural(recipe.batch, 'image')} (each training image about {times}), "
        f"at {recipe.image_size[0]} x {recipe.image_size[1]} pixels.",
        f"{kind} with a learning rate of {recipe.lr:g}{warmup}{decays[recipe.decay]}.",
        describe_augment(recipe.augment),
    ]
    if recipe.ema:
        sentences.append("The model has the average of the weights over training.")
    return " ".join(sentences)


def describe_head(stages: Stages) -> str:
    """What the first stage of a run brought."""
    return (
        f"A head on the frozen features: {percent(stages.head)} of the validation images, "
        f"{percent(stages.cross_validation)} of the training images by cross-validation (l2 {stages.l2:g})."
    )


def describe_tuning(stages: Stages) -> str:
    """What fine-tuning brought after it."""
    if stages.tuned is None:
        return "Fine-tuning is not finished." if stages.steps else "The time was too short for fine-tuning."
    kept = "so it was kept" if stages.tuned >= stages.head else "too small a difference to count, so it was kept"
    return (
        f"Fine-tuning from that head: {percent(stages.tuned)} of the validation images, "
        f"{kept if stages.kept else 'so the head stayed'}."
    )


def describe_augment(augment: Augment) -> str:
    """The augmentation as text."""
    if augment.crop == "inception":
        low, high = (round(100 * side) for side in augment.area)
        done = [f"cropped to {low} to {high} % of their area"]
    else:
        done = ["cropped at random places"] if augment.crop == "resize" else []
    done += ["mirrored half the time"] if augment.flip else []
    done += [f"changed by {plural(augment.randaugment[0], 'random operation')}"] if augment.randaugment[0] else []
    done += ["blended in pairs"] if augment.mixup or augment.cutmix else []
    if not done:
        return "Images were not augmented."
    return f"Images were {', '.join(done[:-1])}{' and ' if len(done) > 1 else ''}{done[-1]}."
