"""What stands in for large data, weights and machines where the commands of the documentation are run.

A page runs in a folder of its own. FILES are made there before, under the names that the page uses; REPLACE changes the
text of commands and of Python blocks; APPEND adds words to commands that start with a text; PARSED lists commands that
are only parsed, with the reason. Everything not listed runs as it is written.
"""

import json
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from PIL import Image

import vitlab
from vitlab.data.imagenet import synsets

Make = Callable[[Path], None]
CLASSES = ("beagle", "pug", "tabby")
TINY = {"depth": 1, "width": 24, "mlp": 48, "heads": 2}
TINY_TIMM = {
    "width": 64,
    "heads": 1,
}  # a timm file's heads follow from its width
TINY_RUN = "depth=1 width=24 mlp=48 heads=2 steps=2 batch=8 micro=4 warmup=0 workers=0 compile=no device=cpu"
SMALL_RUN = f"{TINY_RUN} model=Ti/16 image_size=32 prelogits=8"
STUDIED = "image_size=32 depth=1 width=24 mlp=48 heads=2 steps=2 warmup=0 batch=8 workers=0 compile=no device=cpu"
TINY_COMPARISON = "--against timm --image-size 32 --batch 1 --rounds 1 --seconds 0.01 --mode eager"
# What `vitlab demo` does, with a fifth of its training.
SHORT_DEMO = (
    "vitlab train digits steps=240 --out runs/demo && python -c "
    '"from pathlib import Path; from rich.console import Console; from vitlab import demo; '
    "demo.show(Console(), Path('runs/demo'))\""
)
TUNED = "steps=2 batch=8 workers=0 device=cpu"
TUNED_IN_PYTHON = 'steps=2, batch=8, workers=0, device="cpu"'


# ---- what is made


def photo(path: Path, seed: int = 0, size: tuple[int, int] = (40, 32)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(path)


def class_folders(path: Path, each: int = 4, classes: tuple[str, ...] = CLASSES, suffix: str = ".jpg") -> None:
    for i, name in enumerate(classes):
        for j in range(each):
            photo(path / name / f"{name}-{j}{suffix}", seed=1000 * i + j)


def splits(path: Path, train: int = 4, test: int = 2) -> None:
    """A data set with a training and a test split."""
    class_folders(path / "train", train)
    for i, name in enumerate(CLASSES):
        for j in range(test):
            photo(path / "val" / name / f"{j}.jpg", seed=5000 + 100 * i + j)


def pets(path: Path) -> None:
    splits(path, train=70)


def shards(path: Path) -> None:
    """Two tar shards in the WebDataset layout."""
    path.mkdir(parents=True)
    for number in range(2):
        with tarfile.open(path / f"train-{number:04d}.tar", "w") as tar:
            for i in range(8):
                image = BytesIO()
                pixels = np.random.default_rng(i).integers(0, 256, (32, 32, 3), np.uint8)
                Image.fromarray(pixels).save(image, "JPEG")
                for name, data in ((f"{number}{i}.jpg", image.getvalue()), (f"{number}{i}.cls", str(i % 3).encode())):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, BytesIO(data))


def imagenet(path: Path) -> None:
    """The ImageNet layout with one validation image of each of 1,000 classes; evaluation needs no others."""
    for number, synset in enumerate(synsets()):
        photo(path / "val" / synset / f"ILSVRC2012_val_{number + 1:08d}.JPEG", number, (32, 32))


def real_labels(path: Path) -> None:
    path.write_text(json.dumps([[i % 1000] for i in range(50_000)]))


def dogs_and_cats(path: Path) -> None:
    path.write_text(json.dumps({"a dog": ["beagle", "pug"], "a cat": "tabby"}))


def vtab(path: Path) -> None:
    """A few images of two of the nineteen tasks."""
    for task in ("cifar", "kitti"):
        for i in range(8):
            photo(path / task / f"{i}.jpg", i, (32, 32))
        for name in ("train800", "val200", "train800val200", "test"):
            (path / task / f"{name}.txt").write_text("".join(f"{i}.jpg {i % 4}\n" for i in range(8)))


def run(labels: tuple[str, ...] | None = CLASSES, name: str = "Ti/16", size: int = 32, **settings: Any) -> Make:
    """A run folder with a small model."""

    def make(path: Path) -> None:
        torch.manual_seed(0)
        classes = settings.pop("classes", len(labels or ()))
        model = vitlab.create(name, image_size=size, classes=classes, **({**TINY, **settings}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.2)
        vitlab.save(model, path, labels=labels)

    return make


def converted(to: str, **settings: Any) -> Make:
    """The same in another format."""

    def make(path: Path) -> None:
        folder = path.parent / f".{path.name}.run"
        run(None if to in ("google", "timm") else CLASSES, **({"classes": 3} | settings))(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        vitlab.convert(folder, path, to)

    return make


def guest(name: str) -> Make:
    """Fresh weights of a model of torchvision's."""

    def make(path: Path) -> None:
        torch.save(torchvision.models.get_model(name).state_dict(), path)

    return make


def imagenet_variant(*classes: str) -> Make:
    return lambda path: class_folders(path, 2, classes)


def write(content: object) -> Make:
    """A JSON file."""

    def make(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))

    return make


CLOCKS = "analog clock; digital clock"
objectnet_mapping = write({"alarm_clock": CLOCKS, "banana": "banana"})
objectnet_labels = write({"alarm_clock": "Alarm clock", "banana": "Banana", "chair_leg": "Leg of a chair"})
objectnet_classes = write({"Alarm clock": CLOCKS, "Banana": "banana"})
PETS_ROW = {"title": "Oxford-IIIT Pets", "mean": 0.9, "std": 0.01}
transfer_results = write({"weights": "vit-b16.npz", "targets": {"pets": PETS_ROW}})


HUGGINGFACE = converted("huggingface", norm_eps=1e-12)
GOOGLE = converted("google", gelu="tanh")
TIMM = converted("timm")


# ---- what each page needs


@dataclass(frozen=True)
class Page:
    """How a page's blocks are run."""

    files: Mapping[str, Make] = field(default_factory=dict)
    replace: Mapping[str, str] = field(default_factory=dict)
    append: Mapping[str, str] = field(default_factory=dict)
    parsed: Mapping[str, str] = field(default_factory=dict)
    names: Callable[[], dict[str, Any]] = dict  # what Python blocks find defined


def images(size: int = 32) -> dict[str, Any]:
    return {"images": torch.rand(1, 3, size, size)}


def model_and_images() -> dict[str, Any]:
    model = vitlab.create("Ti/16", image_size=32, classes=3, **TINY)
    return {**images(), "model": model, "image": torch.rand(3, 32, 32), "batches": [torch.rand(2, 3, 32, 32)]}


TORCHRUN = {"--nproc-per-node 8": "--nproc-per-node 2", "--max-restarts 3 ": ""}

PAGES: dict[str, Page] = {
    "README.md": Page(
        files={
            "photos": class_folders,
            "google/vit-base-patch16-224": HUGGINGFACE,
            "holiday": class_folders,
            "photo.jpg": photo,
            "data/imagenet": splits,
        },
        replace={"/data/": "data/", 'out="runs/photos"': f'out="runs/photos", {TUNED_IN_PYTHON}'},
        append={"vitlab finetune": TUNED, "vitlab train": SMALL_RUN},
        parsed={
            "make": "minutes; the tutorial runs the demo",
            "git clone": "needs a network",
            "vitlab study": "tests/studies/test_study_runs.py runs each of them",
        },
    ),
    "docs/tutorial.md": Page(),
    "docs/api.md": Page(),
    "docs/data.md": Page(
        files={"photos": lambda path: class_folders(path, 15)},
        append={"vitlab finetune": "depth=1 width=24 mlp=48 heads=2 image_size=32 compile=no device=cpu"},
    ),
    "docs/design.md": Page(names=lambda: {**images(384), "photo": Image.new("RGB", (40, 32))}),
    "docs/report.md": Page(),
    "docs/finetuning.md": Page(
        files={"photos": class_folders, "cat.jpg": photo},
        replace={"minutes=5, ": f'weights="none", warmup=0, {TUNED_IN_PYTHON}, '},
        append={"vitlab finetune": f"--weights none {TUNED}"},
    ),
    "docs/paper.md": Page(
        files={
            "ti16": run(size=224, depth=12),
            "photo.jpg": photo,
            "photos": lambda path: class_folders(path, 10),
            "pets": splits,
            "tiny-imagenet": splits,
            "datasets/pets": pets,
            "vtab-1k": vtab,
            "objectnet": lambda path: class_folders(path, 2, ("a dog", "a cat")),
            "objectnet.json": dogs_and_cats,
        },
        append={
            "vitlab train pets-finetune": f"image_size=32 {TUNED} warmup=0",
            "vitlab train B/16-imagenet": SMALL_RUN,
            "vitlab train tiny-imagenet-masked": "image_size=32 steps=2 batch=8 subset=1 warmup=0 workers=0",
            "vitlab transfer": "seeds=1 image_size=32 steps=2 batch=8 workers=0 device=cpu",
            "vitlab vtab": "--steps 2 image_size=32 batch=8 device=cpu",
        },
        parsed={"vitlab study": "tests/studies/test_study_runs.py runs each of them"},
    ),
    "docs/paper.ko.md": Page(
        parsed={"vitlab": "the commands of docs/paper.md, which run there; test_paper_page.py compares them"},
    ),
    "docs/training.md": Page(
        files={"photos": class_folders, "weights.npz": GOOGLE, "DIR": splits, "SHARDS": shards},
        replace=TORCHRUN,
        append={
            "vitlab train digits": "steps=2 warmup=0 workers=0",
            "vitlab finetune": TUNED,
            "vitlab train B/16-imagenet": SMALL_RUN,
            "torchrun": SMALL_RUN,
            "vitlab train tiny-imagenet-masked": "image_size=32 steps=2 batch=8 subset=1 warmup=0 workers=0",
        },
    ),
    "docs/scaling-out.md": Page(
        files={
            "SHARDS": shards,
            "photos": class_folders,
            "WEIGHTS": run(),
            "shards": shards,
            "shared/i21k": shards,
        },
        replace={
            **TORCHRUN,
            "/shared/": "shared/",
            "{0000..2047}": "{0000..0001}",
            "--resume'": f"--resume {SMALL_RUN}'",
        },
        append={
            "vitlab train B/16": SMALL_RUN,
            "torchrun --nproc-per-node 2 --no-python vitlab finetune": TUNED,
            "torchrun --nproc-per-node 2 --no-python vitlab train": SMALL_RUN,
            "vitlab bench": f"{SMALL_RUN} --seconds 1",
        },
        parsed={"torchrun --nnodes 2": "needs two machines"},
    ),
    "docs/weights.md": Page(
        files={
            "google/vit-base-patch16-224": HUGGINGFACE,
            "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k": TIMM,
            "ViT-B_16.npz": GOOGLE,
            "runs/mine": run(),
            "R26_S_32.npz": converted("google", name="R26+S/32", size=64, gelu="tanh"),
        },
        parsed={"vitlab convert runs/mine mine-hub": "needs a network and an account"},
    ),
    "docs/evaluation.md": Page(
        files={
            "runs/digits": run(tuple("0123456789"), "Ti/2", 8),
            "runs/pets": run(),
            "runs/mine": run(),
            "runs/b16": run(),
            "photos": lambda path: class_folders(path, 8),
            "pets": pets,
            "vit.safetensors": converted("timm", classes=1000, **TINY_TIMM),
            "vit_tiny_patch16_224.safetensors": converted("timm", size=224, **TINY_TIMM),
            "vit-b16.npz": GOOGLE,
            "data/imagenet": imagenet,
            "real.json": real_labels,
            "vtab-1k": vtab,
        },
        replace={"/data/": "data/", "oxford-pets": "pets", "cifar100": "pets", "--steps 500": "--steps 2"},
        append={"vitlab vtab": "--steps 2 image_size=32 batch=8 device=cpu"},
    ),
    "docs/studies.md": Page(
        files={name: lambda path: splits(path, train=6) for name in ("tiny-imagenet", "pets", "flowers")},
        append={
            "vitlab study positions data=": f"seeds=1 {STUDIED}",
            "vitlab study positions data=tiny-imagenet targets=pets,flowers --jobs": "--only none,1d-stem",
            "srun vitlab study head": f"--only token-0.0003 seeds=1 {STUDIED}",
            "vitlab train study": STUDIED,
            "vitlab fewshot": "--keep features",
        },
    ),
    "docs/comparing.md": Page(
        files={
            "runs/pets": run(),
            "runs/mine": run(),
            "runs/transfer/results.json": transfer_results,
            "vit.safetensors": converted("timm", classes=1000, **TINY_TIMM),
            "vit-b16.npz": GOOGLE,
            "photos": lambda path: class_folders(path, 10),
            "sets/pets": splits,
            "sets/flowers": splits,
            "data/imagenet": imagenet_variant("n01440764", "n02123045", "n07753592"),
            "imagenetv2": imagenet_variant("0", "281", "999"),
            "sketch": imagenet_variant("n01440764", "n02123045"),
            "imagenet-r": imagenet_variant("n01440764", "n02123045"),
            "objectnet": imagenet_variant("alarm_clock", "banana", "chair_leg"),
            "objectnet_to_imagenet.json": objectnet_mapping,
            "folder_to_objectnet_label.json": objectnet_labels,
            "objectnet_to_imagenet_1k.json": objectnet_classes,
            "resnet50-11ad3fa6.pth": guest("resnet50"),
            "swin_t-704ceda3.pth": guest("swin_t"),
            "efficientnet_b0_rwightman-7f5810bc.pth": guest("efficientnet_b0"),
        },
        replace={"/data/": "data/", "runs/pets runs/transfer": "runs/transfer", "--shots 1,5": "--shots 1"},
        append={
            "vitlab transfer vit-b16.npz": f"image_size=32 seeds=1 {TUNED}",
            "vitlab transfer runs/mine --data": f"image_size=32 {TUNED}",
            "vitlab transfer runs/mine --quick": "device=cpu workers=0",
        },
    ),
    "docs/looking-inside.md": Page(
        files={
            "runs/mine": run(depth=12),
            "ti16": run(("palace", "daisy", "vase"), size=224, depth=12),
            "photo.jpg": photo,
            "photos": class_folders,
        },
        names=model_and_images,
    ),
    "docs/using.md": Page(
        files={
            "runs/pets": run(),
            "cat.jpg": photo,
            "holiday": class_folders,
            "photos": lambda path: class_folders(path, 6),
            "scans": lambda path: class_folders(path, suffix=".png"),
            "scans/one.png": photo,
        },
        replace=TORCHRUN,
        append={"vitlab export runs/pets pets-int8.onnx": "--least-agreement 0.5"},
        parsed={"vitlab predict runs/pets https:": "needs a network"},
    ),
    "docs/serving.md": Page(
        files={"runs/mine": run(), "cat.jpg": photo, "dog.jpg": photo, "photos": class_folders},
        replace={"the.host": "127.0.0.1"},
        parsed={"docker": "needs Docker; tests/serving/test_dockerfile.py checks what it can"},
        append={"vitlab finetune": TUNED},
    ),
    "docs/box.md": Page(
        files={"photo.jpg": photo, "other.jpg": photo, "photos": class_folders, "box": run()},
        parsed={"python benchmarks": "needs a finished run", "vitlab evaluate": "needs Tiny-ImageNet"},
        names=lambda: {"vitlab": vitlab},
    ),
    "docs/results/studies.md": Page(),
    "docs/results/timm.md": Page(),
    "docs/results/README.md": Page(
        files={
            "PETS": splits,
            "FLOWERS": splits,
            "TINY": splits,
            "TEN": splits,
            "TI16": run(name="Ti/16", depth=12, width=192, mlp=768, heads=3),
        },
        replace={"epochs=30 ": "", "epochs=80 ": ""},  # `steps` are appended
        append={
            "vitlab train pets-finetune": f"image_size=32 {TUNED} warmup=0",
            "vitlab train tiny-imagenet": f"{TINY_RUN} image_size=32",
            "vitlab train pets-96": f"{TINY_RUN} image_size=32",
            "vitlab train flowers-96": f"{TINY_RUN} image_size=32",
        },
    ),
    "docs/performance.md": Page(
        replace={"B/16": "Ti/16"},
        append={"vitlab bench compare": TINY_COMPARISON},
        parsed=dict.fromkeys(
            ("vitlab predict runs/pets", "vitlab serve runs/pets"), "needs a GPU with products in 8 bits"
        ),
    ),
    "docs/reliability.md": Page(parsed={"make chaos": "takes an hour", "(cd tests": "takes minutes"}),
    "docs/releasing.md": Page(parsed={"": "publishes a version"}),
    "docs/index.md": Page(),
    "docs/settings.md": Page(),
}
