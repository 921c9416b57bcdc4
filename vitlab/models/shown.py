"""Images of another size for a while, as at the start of a run: an optimizer keeps its parameters, as all stay."""

import dataclasses

from vitlab.errors import UserError
from vitlab.models.axial import AxialBlock
from vitlab.models.config import ModelConfig, ResNetConfig, Size, ViTConfig
from vitlab.models.positions import Axes, Table
from vitlab.models.rotary import Rotary
from vitlab.models.variants import Model


def shown_config(config: ModelConfig, size: Size) -> ModelConfig:
    """The config of a model that is shown images of a size; UserError where it cannot take them."""
    if isinstance(config, ViTConfig) and config.positions == "relative":
        raise UserError("relative positions have a table for one grid of patches alone; leave small_size")
    if isinstance(config, ResNetConfig) and config.attention == "axial":
        raise UserError("a ResNet's axial attention has positions for one size of images alone; leave small_size")
    return dataclasses.replace(config, image_size=size)


def show(model: Model, size: Size) -> None:
    """Let a model take images of a size from now on; its config stays too, and with it what the model is.

    Learned positions are resampled in every pass, as by `resize`, and learn through that.
    """
    if size == (model.shown or model.config.image_size):
        return
    config, model.shown = shown_config(model.config, size), size
    if not isinstance(config, ViTConfig):
        return
    for module in model.modules():
        if isinstance(module, Table | Axes):
            module.show(config.grid)
        elif isinstance(module, Rotary):
            module.show(config)
        elif isinstance(module, AxialBlock):
            module.grid = config.grid
