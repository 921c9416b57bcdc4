"""What every model has beside its layers: class names, and the way from an image to its input."""

from torch import Tensor, nn

from vitlab.models.card import Card
from vitlab.models.config import ModelConfig, Size


class ImageModel(nn.Module):
    """A model of images with its card: preprocessing, class names and provenance travel with the weights."""

    config: ModelConfig
    card: Card
    shown: Size | None = None  # the size of images that it takes for now, see shown.py; None: its config's

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the logits; "class 0" and so on where the weights have none.

        >>> import vitlab
        >>> vitlab.create("Ti/16", classes=2, depth=1).labels
        ('class 0', 'class 1')
        """
        return self.card.labels or tuple(f"class {i}" for i in range(self.config.classes))

    def preprocess(self, images: object) -> Tensor:
        """Images as the model's input, (B, 3, height, width): cropped as in evaluation, normalized, on its device.

        Args:
            images: a path, a PIL image, an array (height, width, 3), a tensor (3, height, width), or a list of them.
                Arrays and tensors hold bytes, or floats from 0 to 1. One image gives a batch of one.

        Raises:
            UserError: a file cannot be read, or what is given is not an image.

        >>> import vitlab
        >>> from PIL import Image
        >>> model = vitlab.create("Ti/16", classes=2, depth=1, image_size=64)
        >>> model(model.preprocess(Image.new("RGB", (200, 100)))).shape
        torch.Size([1, 2])
        """
        from vitlab import model_input  # reading files is of a floor above: the package's lazy name leads there

        weight = next(self.parameters())
        return model_input(images, self.config.image_size, self.card.preprocess, weight)
