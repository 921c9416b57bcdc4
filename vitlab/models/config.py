"""What a model is, as data: frozen dataclasses whose values are checked once. Nothing here imports torch."""

from dataclasses import dataclass
from typing import Literal

from vitlab.errors import UserError
from vitlab.settings import at_least, check_positive, check_rate, check_types, is_list
from vitlab.text import listed

Pool = Literal["token", "mean", "attention"]
PositionKind = Literal["none", "1d", "2d", "relative", "sinusoidal"]
Placement = Literal["stem", "every", "shared"]
AttentionKind = Literal["full", "axial"]
Gelu = Literal["exact", "tanh"]
Standardize = Literal["sigma", "variance"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
Fit = Literal["crop", "stretch"]
Size = tuple[int, int]
Color = tuple[float, float, float]

# What a settings file from a stranger may ask for; without bounds one number in it takes all memory.
LARGEST_SIDE = 8192  # of the model's input, in pixels
LEAST_CROP, LEAST_STD = 0.1, 1e-4
MOST_CLASSES = 1_000_000
MOST = {"patch": LARGEST_SIDE, "depth": 1000, "width": 1 << 16, "mlp": 1 << 20, "heads": 1 << 16}
MOST |= {"classes": MOST_CLASSES, "prelogits": 1 << 16}


@dataclass(frozen=True)
class StemConfig:
    """The hybrid's ResNet stem: a root (stride 4), then stages of post-activation bottlenecks."""

    stages: tuple[int, ...]
    width: int = 64
    standardize: Standardize = "sigma"  # (w - mean) / (sigma + eps), or / sqrt(variance + eps)
    standardize_eps: float = 1e-5
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_types(self)
        check_stages(self)

    @property
    def channels(self) -> int:
        return self.width * 4 * 2 ** (len(self.stages) - 1) if self.stages else self.width

    @property
    def stride(self) -> int:
        return int(4 * 2 ** max(0, len(self.stages) - 1))


@dataclass(frozen=True)
class ViTConfig:
    """A Vision Transformer: plain, hybrid (with a stem) or axial."""

    image_size: Size
    patch: int  # side of a patch, in pixels, or in cells of the stem's map
    depth: int
    width: int
    mlp: int
    heads: int
    classes: int = 1000  # 0: no head, the model returns its features
    stem: StemConfig | None = None
    pool: Pool = "token"
    prelogits: int = 0  # width of the tanh layer before the head; 0: none
    positions: PositionKind = "1d"
    placement: Placement = "stem"
    attention: AttentionKind = "full"
    gelu: Gelu = "exact"
    norm_eps: float = 1e-6
    dropout: float = 0.0
    drop_path: float = 0.0  # stochastic depth: rate of the last layer, growing linearly from 0

    def __post_init__(self) -> None:
        check_types(self)
        for field in ("patch", "depth", "width", "mlp", "heads"):
            at_least(self, field, 1)
        at_least(self, "classes", 0)
        at_least(self, "prelogits", 0)
        not_huge(self, *MOST)
        check_positive(self, "norm_eps")
        check_rate(self, "dropout")
        check_rate(self, "drop_path")
        if self.width % self.heads:
            fit = [h for h in range(1, min(self.width, 1024) + 1) if self.width % h == 0]
            near = sorted(sorted(fit, key=lambda h: abs(h - self.heads))[:3])
            raise UserError(f"{self.heads} heads do not divide the width {self.width}; {listed(near)} would")
        check_size(self.image_size, self.stride)
        self._check_positions()
        if self.attention == "axial" and self.pool == "token":
            raise UserError(
                "axial attention works on the grid and has no class token; use pool='mean' or pool='attention'"
            )

    def _check_positions(self) -> None:
        kind, place = self.positions, self.placement
        if kind == "none" and place != "stem":
            raise UserError(f"positions='none' has nothing to place; placement='{place}' is meaningless")
        if kind == "relative" and place != "stem":
            raise UserError(
                f"positions='relative' lives inside every attention layer already; placement='{place}' is meaningless"
            )
        if kind == "sinusoidal" and place == "every":
            raise UserError("sinusoidal tables are fixed, so one per layer is the same as placement='shared'; use that")
        if kind == "relative" and self.attention == "axial":
            raise UserError("relative positions are offsets in the full grid; use another kind with axial attention")
        if kind == "2d" and self.width % 2:
            raise UserError(f"positions='2d' halves the width for its two axes, and {self.width} is odd")

    @property
    def stride(self) -> int:
        """Pixels from one patch to the next."""
        return self.patch * (self.stem.stride if self.stem else 1)

    @property
    def grid(self) -> Size:
        """Patches down and across."""
        return self.image_size[0] // self.stride, self.image_size[1] // self.stride

    @property
    def token(self) -> bool:
        """Whether a class token leads the sequence."""
        return self.pool == "token"

    @property
    def length(self) -> int:
        """Tokens in the sequence, class token included."""
        return self.grid[0] * self.grid[1] + self.token


@dataclass(frozen=True)
class ResNetConfig:
    """A BiT ResNet: pre-activation bottlenecks, group norm, weight-standardized convolutions."""

    image_size: Size
    stages: tuple[int, ...]
    width: int = 64  # channels of the root; 64 times the width factor
    classes: int = 1000
    standardize: Standardize = "variance"
    standardize_eps: float = 1e-10
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        check_types(self)
        check_stages(self)
        if not self.stages:
            raise UserError("a ResNet needs at least one stage")
        at_least(self, "classes", 0)
        not_huge(self, "classes")
        check_size(self.image_size, 1)

    @property
    def channels(self) -> int:
        return int(self.width * 4 * 2 ** (len(self.stages) - 1))

    @property
    def grid(self) -> Size:
        """Cells of the final map, down and across: every stride-2 step rounds up."""
        halvings = len(self.stages) + 1
        height, width = (-(-side // 2**halvings) for side in self.image_size)
        return height, width

    @property
    def length(self) -> int:
        return self.grid[0] * self.grid[1]


ModelConfig = ViTConfig | ResNetConfig


@dataclass(frozen=True)
class Preprocess:
    """How a photo becomes the model's input; it travels with the weights."""

    mean: Color = (0.5, 0.5, 0.5)
    std: Color = (0.5, 0.5, 0.5)
    interpolation: Interpolation = "bilinear"
    fit: Fit = "crop"  # scale to cover and cut the center, or stretch to the size whatever the shape
    crop: float = 0.875  # with fit="crop": the share of the scaled image that the center keeps

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "std")
        if not LEAST_CROP <= self.crop <= 1:  # a photo is scaled to size / crop before its center is cut
            raise UserError(f"crop must be at least {LEAST_CROP} and at most 1, not {self.crop}")
        if not all(-255 <= value <= 255 for value in self.mean):
            raise UserError(f"mean must be three numbers from -255 to 255, not {self.mean}")
        if not all(LEAST_STD <= value <= 255 for value in self.std):
            raise UserError(f"std must be three numbers from {LEAST_STD} to 255, not {self.std}")


def as_size(size: object) -> Size:
    """An image size as (height, width), from an int or a pair."""
    pair = (size, size) if isinstance(size, int) else tuple(size) if is_list(size) else ()
    if len(pair) != 2 or not all(type(side) is int for side in pair):
        raise UserError(f"image_size must be an integer or (height, width), not {size!r}")
    if min(pair) < 1:
        raise UserError(f"image_size must be positive, not {size!r}")
    if max(pair) > LARGEST_SIDE:
        raise UserError(f"image_size must be at most {LARGEST_SIDE}, not {size!r}")
    return pair


# ---- checks shared by the configs


def check_size(size: Size, stride: int) -> None:
    as_size(size)
    if size[0] % stride == 0 and size[1] % stride == 0:
        return
    side = next(s for s in size if s % stride)
    below, above = side // stride * stride, (side // stride + 1) * stride
    fit = f"{below} or {above}" if below else f"{above}"
    raise UserError(
        f"patches of {stride} pixels do not divide an image of {size[0]}x{size[1]}: use {fit} for {side}, "
        f"or any other multiple of {stride}"
    )


def check_stages(config: StemConfig | ResNetConfig) -> None:
    check_positive(config, "norm_eps", "standardize_eps")
    if any(units < 1 for units in config.stages):
        raise UserError(f"every stage needs at least one unit, not {config.stages}")
    if len(config.stages) > 10 or sum(config.stages) > MOST["depth"]:
        raise UserError(f"a ResNet has at most 10 stages and {MOST['depth']} units")
    if config.width < 1 or config.width % 32:
        raise UserError(f"a ResNet's width must be a multiple of its 32 norm groups, not {config.width}")
    not_huge(config, "width")


def not_huge(config: object, *fields: str) -> None:
    for field in fields:
        if getattr(config, field) > MOST[field]:
            raise UserError(f"{field} must be at most {MOST[field]:,}, not {getattr(config, field):,}")
