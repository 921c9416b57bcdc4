"""A model and a recipe as people would say them."""

from vitlab.data.transforms import Augment
from vitlab.models.config import ModelConfig, ResNetConfig
from vitlab.models.variants import name_of
from vitlab.text import duration
from vitlab.training.recipe import Recipe


def model_name(config: ModelConfig) -> str:
    """ViT-B/16 where it is a model of the paper, else its kind."""
    name = name_of(config)
    if isinstance(config, ResNetConfig):
        return f"ResNet {name}" if name else "ResNet"
    if config.stem is not None:
        return f"hybrid {name}" if name else "hybrid ViT"
    kind = "axial ViT" if config.attention == "axial" else "ViT"
    return f"{kind}-{name}" if name else kind


def build_of(config: ModelConfig) -> str:
    """What a model is made of."""
    pixels = f"{config.image_size[0]} x {config.image_size[1]} pixels"
    if isinstance(config, ResNetConfig):
        return f"{sum(config.stages)} units in {len(config.stages)} stages, images of {pixels}"
    h, w = config.grid
    return (
        f"{config.depth} layers of {many(config.heads, 'head')}, width {config.width}, "
        f"{h} x {w} patches of images of {pixels}"
    )


def count(number: float) -> str:
    """1.2 thousand and the like, to three digits: 853, 85.8 k, 5.72 M, 1.2 G."""
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.3g}"


def share(value: float) -> str:
    """A rate with as many digits as it needs: 87.3 %, 100 %; the space does not break."""
    return f"{100 * value:.1f}".removesuffix(".0") + "\u00a0%"


def moment(seconds: float) -> str:
    """A duration of which short ones have a digit more."""
    return f"{seconds:.1f} s" if seconds < 10 else duration(seconds)


def many(number: int, thing: str) -> str:
    more = "es" if thing.endswith("ss") else "s"
    return f"{number:,} {thing}{'' if number == 1 else more}"


def how(recipe: Recipe, images: int) -> str:
    """The recipe in a few sentences; `images`: of the training set."""
    steps = recipe.steps or 0
    what = "The head alone learned" if recipe.freeze == "body" else "All weights learned"
    kind = {"sgd": "SGD", "adamw": "AdamW"}[recipe.optimizer]
    passes = f"{steps * recipe.batch / max(1, images):.1f}".removesuffix(".0")
    said = [
        f"{what} for {many(steps, 'step')} of {many(recipe.batch, 'image')} (each training image about {passes} "
        f"times), at {recipe.image_size[0]} x {recipe.image_size[1]} pixels."
    ]
    fall = {"cosine": ", then falling by a cosine", "linear": ", then falling in a line", "constant": ""}[recipe.decay]
    rise = f", reached over {many(recipe.warmup, 'step')}" if recipe.warmup else ""
    said.append(f"{kind} with a learning rate of {recipe.lr:g}{rise}{fall}.")
    said.append(augmented(recipe.augment))
    if recipe.ema:
        said.append("The model is the average of the weights along the way.")
    return " ".join(said)


def augmented(augment: Augment) -> str:
    """What was done to the images."""
    if augment.crop == "inception":
        low, high = (round(100 * side) for side in augment.area)
        done = [f"cut to {low} to {high} % of the picture"]
    else:
        done = ["cut at random places"] if augment.crop == "resize" else []
    done += ["mirrored half the time"] if augment.flip else []
    done += [f"changed by {many(augment.randaugment[0], 'random operation')}"] if augment.randaugment[0] else []
    done += ["blended in pairs"] if augment.mixup or augment.cutmix else []
    if not done:
        return "Images were shown as they are."
    return f"Images were {', '.join(done[:-1])}{' and ' if len(done) > 1 else ''}{done[-1]}."
