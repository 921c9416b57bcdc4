"""The paper's own numbers, to stand beside: accuracy of fine-tuned models by data set, and cost of pre-training.

Nothing here was measured with this package. Accuracies are in percent with the deviation over three runs, where the
paper has it; cost is in TPUv3-core-days, and in exaFLOPs, three forward passes for a training image.
"""

from dataclasses import dataclass, field

Score = tuple[float, float | None]  # percent, deviation

DATA = (
    *("ImageNet", "ImageNet ReaL", "CIFAR-10", "CIFAR-100", "Oxford-IIIT Pets", "Oxford Flowers-102"),
    *("VTAB (19 tasks)", "ObjectNet"),
)


@dataclass(frozen=True)
class Published:
    """A column of the paper's table of results."""

    name: str
    scores: dict[str, Score]
    core_days: float | None = None  # TPUv3
    exaflops: float | None = None  # where the paper's table of costs has this very model
    note: str = ""
    data: str = field(default="")  # pre-trained on


def column(*scores: Score | None) -> dict[str, Score]:
    return {name: score for name, score in zip(DATA, scores, strict=False) if score is not None}


PUBLISHED = (
    Published(
        "ViT-H/14",
        column(
            *((88.55, 0.04), (90.72, 0.05), (99.50, 0.06), (94.55, 0.04), (97.56, 0.03), (99.68, 0.02)),
            *((77.63, 0.23), (61.7, None)),
        ),
        core_days=2_500,
        exaflops=4_262,
        data="JFT-300M",
        note="82.1 top-5 on ObjectNet",
    ),
    Published(
        "ViT-L/16",
        column((87.76, 0.03), (90.54, 0.03), (99.42, 0.03), (93.90, 0.05), (97.32, 0.11), (99.74, 0.00), (76.28, 0.46)),
        core_days=680,
        data="JFT-300M",
    ),
    Published(
        "ViT-L/16",
        column((85.30, 0.02), (88.62, 0.05), (99.15, 0.03), (93.25, 0.05), (94.67, 0.15), (99.61, 0.02), (72.72, 0.21)),
        core_days=230,
        data="ImageNet-21k",
    ),
    Published(
        "BiT-L R152x4",
        column((87.54, 0.02), (90.54, None), (99.37, 0.06), (93.51, 0.08), (96.62, 0.23), (99.63, 0.03), (76.29, 1.70)),
        core_days=9_900,
    ),
    Published(
        "Noisy Student EfficientNet-L2",
        column((88.4, None), (90.55, None)),
        core_days=12_300,
        note="88.5 on ImageNet as well",
    ),
    Published("iGPT-L", column((72.0, None)), note="by a linear probe of its features; 1.4 B parameters"),
)


@dataclass(frozen=True)
class Compute:
    """A row of the paper's table of costs: pre-trained on JFT-300M at 224 px, then fine-tuned on ImageNet."""

    model: str
    epochs: int
    exaflops: float
    imagenet: float  # percent

    @property
    def family(self) -> str:
        """ViT, hybrid or ResNet."""
        return "hybrid" if "+" in self.model else "ViT" if self.model.startswith("ViT") else "ResNet"


COMPUTE = (
    Compute("ViT-B/32", 7, 55, 80.73),
    Compute("ViT-B/16", 7, 224, 84.15),
    Compute("ViT-L/32", 7, 196, 84.37),
    Compute("ViT-L/16", 7, 783, 86.30),
    Compute("ViT-L/16", 14, 1567, 87.12),
    Compute("ViT-H/14", 14, 4262, 88.08),
    Compute("ResNet50x1", 7, 50, 77.54),
    Compute("ResNet50x2", 7, 199, 82.12),
    Compute("ResNet101x1", 7, 96, 80.67),
    Compute("ResNet152x1", 7, 141, 81.88),
    Compute("ResNet152x2", 7, 563, 84.97),
    Compute("ResNet152x2", 14, 1126, 85.56),
    Compute("ResNet200x3", 14, 3306, 87.22),
    Compute("R50+ViT-B/32", 7, 106, 84.90),
    Compute("R50+ViT-B/16", 7, 274, 85.58),
    Compute("R50+ViT-L/32", 7, 246, 85.68),
    Compute("R50+ViT-L/16", 7, 859, 86.60),
    Compute("R50+ViT-L/16", 14, 1668, 87.12),
)
