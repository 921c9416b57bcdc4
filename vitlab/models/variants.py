"""Models from their names in the paper, with fresh weights."""

from typing import Any

from vitlab.models.config import ModelConfig, ViTConfig
from vitlab.models.names import BY_NAME, configure
from vitlab.models.resnet import ResNet
from vitlab.models.vit import ViT
from vitlab.settings import takes

Model = ViT | ResNet


@takes(ViTConfig, skip=BY_NAME, image_size=224)
def create(name: str, **settings: Any) -> Model:
    """A model of the paper with fresh weights.

    Args:
        name: size/patch such as "B/16", stem+size/patch such as "R50+B/16", or a ResNet such as "R50x1".
        settings: any of those below; None stands for the variant's own value. Depth, width, mlp and heads follow
            from the size; axial attention pools by mean; a ResNet has only image_size, classes, norm_eps
            and attention="axial".

    Returns:
        The model in training mode on the CPU: `model(images)` takes (B, 3, height, width) to logits (B, classes),
        `model.tokens` to (B, N, D) and `model.features` to (B, D).

    Raises:
        UserError: for a name outside the grammar, an unknown setting (the nearest one is named) or a wrong value.

    >>> model = create("Ti/8", classes=10, image_size=(64, 96), positions="2d", pool="mean")
    >>> model(torch.zeros(2, 3, 64, 96)).shape
    torch.Size([2, 10])
    """
    return build(configure(name, settings))


def build(config: ModelConfig) -> Model:
    """The model that a config describes, with new random weights.

    Args:
        config: a `ViTConfig` or a `ResNetConfig`, such as the `config` of another model.

    Returns:
        The model in training mode on the CPU, in float32.

    >>> import vitlab
    >>> model = vitlab.create("Ti/16", image_size=32, depth=1, classes=2)
    >>> vitlab.build(model.config).config == model.config
    True
    """
    return ViT(config) if isinstance(config, ViTConfig) else ResNet(config)
