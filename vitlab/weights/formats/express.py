"""What a format cannot express: a model that another library would compute differently is an error."""

from collections.abc import Collection
from dataclasses import fields as fields_of

from vitlab.errors import UserError
from vitlab.models.config import RATES, Gelu, ModelConfig, Pool, PositionKind, ResNetConfig, ViTConfig
from vitlab.text import listed
from vitlab.weights.formats.base import FormatDefaults, settings_of

# Fields that every ViT has, or that are checked one by one below and by `check_settings`; rates are for training.
COMMON = {"image_size", "patch", "depth", "width", "mlp", "heads", "classes", "stem", "pool", "prelogits", "positions"}
COMMON |= {"placement", "attention", "gelu", "norm_eps", *RATES}


def cannot_express(target: str, part: str, fix: str = "") -> UserError:
    return UserError(f"{target} cannot express {part}" + (f"; {fix}" if fix else ""))


def check_vit(
    c: ModelConfig,
    target: str,
    *,
    stem: bool = False,
    pools: tuple[Pool, ...] = ("token",),
    positions: tuple[PositionKind, ...] = ("1d",),
    square: bool = False,
    gelus: tuple[Gelu, ...] = ("exact", "tanh"),
    fields: Collection[str] = (),
) -> ViTConfig:
    """Refuse a model that is not a ViT with full attention and positions at the stem, or not as the target needs it.

    `fields` names the switches of later families that the target has; any other must have its default.
    """
    if isinstance(c, ResNetConfig):
        raise cannot_express(target, "a ResNet")
    height, width = c.image_size
    faults = {
        "axial attention": c.attention == "axial",
        f"positions='{c.positions}'": c.positions not in positions,
        f"positions at every layer (placement='{c.placement}')": c.placement != "stem",
        "a ResNet stem": c.stem is not None and not stem,
        f"pool='{c.pool}', only {listed(pools)}": c.pool not in pools,
        f"images that are not square ({height}x{width})": square and height != width,
        f"gelu='{c.gelu}'": c.gelu not in gelus,
    }
    for f in fields_of(ViTConfig):
        if f.name not in COMMON and f.name not in fields:
            faults[f"{f.name}={getattr(c, f.name)!r}"] = getattr(c, f.name) != f.default
    for part, is_fault in faults.items():
        if is_fault:
            raise cannot_express(target, part)
    return c


def check_resnet(c: ResNetConfig, target: str, fixed: FormatDefaults) -> None:
    """Refuse a ResNet that is not plain, or not as the target needs it."""
    if c.attention != "none":
        raise cannot_express(target, "a ResNet with axial attention")
    check_settings(c, target, fixed)


def check_settings(c: ModelConfig, target: str, fixed: FormatDefaults) -> None:
    """Refuse a model whose settings differ from those that are fixed in the target."""
    pairs = [(name, value, vars(fixed)[name]) for name, value in vars(settings_of(c)).items()]
    wrong = [(name, value, only) for name, value, only in pairs if None not in (value, only) and value != only]
    if wrong:
        part = " and ".join(f"{name}={value} (only {only})" for name, value, only in wrong)
        fix = " ".join(f"{name}={only}" for name, _, only in wrong)
        raise cannot_express(target, part, f"to accept slightly other logits, read the model with {fix}")
