"""docs/paper.md and docs/paper.ko.md: two languages of one page, and numbers that are those of the package.

The commands are run with those of the other pages, by test_docs.py.
"""

import ast
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from docs_commands import FENCE, ROOT, blocks, inline_commands, words

from vitlab.cost import forward_flops
from vitlab.models.config import ViTConfig
from vitlab.models.meta import meta_model
from vitlab.models.names import SIZES, configure
from vitlab.studies import optimizer, positions, shape
from vitlab.studies.catalog import STUDIES
from vitlab.studies.published import COMPUTE, DATA, PUBLISHED
from vitlab.studies.vtab_tasks import GROUPS, TASKS
from vitlab.training.recipe import Recipe
from vitlab.training.recipes import IMAGES, RECIPES

ENGLISH, KOREAN = ROOT / "docs" / "paper.md", ROOT / "docs" / "paper.ko.md"
SETS = {"JFT-300M": "jft", "ImageNet-21k": "imagenet21k", "ImageNet": "imagenet"}
NOT_IN_THE_TABLE = {("R152x2", "jft", 14), ("R200x3", "jft", 14), ("R26+B/32", "imagenet21k", 90)}
NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:e-\d+)?")
Rows = list[list[str]]


@functools.cache
def prose(page: Path) -> str:
    """The page without its blocks."""
    return FENCE.sub("", page.read_text("utf-8"))


@functools.cache
def tables(page: Path) -> list[Rows]:
    """All tables, their headings first, as text without emphasis."""
    found: list[Rows] = []
    for text in re.findall(r"(?:^\|.*\n)+", prose(page), re.MULTILINE):
        lines = [line.strip("|").split("|") for line in text.replace("**", "").splitlines()]
        found.append([[cell.strip() for cell in line] for line in lines if set("".join(line)) - set(" -")])
    return found


def table(*headings: str) -> Rows:
    """The rows of the one table of the English page whose first headings are these."""
    (found,) = [rows for rows in tables(ENGLISH) if tuple(rows[0][: len(headings)]) == headings]
    return found[1:]


# ---- the two languages


def commands(page: Path) -> list[list[str]]:
    return [words(command) for block in blocks(page) if block.language == "bash" for command in block.commands]


def code(page: Path) -> list[str]:
    return [ast.unparse(ast.parse(block.text)) for block in blocks(page) if block.language == "python"]


def figures(page: Path) -> list[str]:
    return re.findall(r"^!\[.+\]\((.+)\)$", prose(page), re.MULTILINE)


def markers(page: Path) -> list[str]:
    return re.findall(r"^<!-- study: (\w+) -->$", prose(page), re.MULTILINE)


def headings(page: Path) -> list[str]:
    return re.findall(r"^(#+) ", prose(page), re.MULTILINE)


def links(page: Path) -> list[str]:
    other = {ENGLISH: KOREAN, KOREAN: ENGLISH}[page].name
    return [link for link in re.findall(r"(?<!!)\[[^\]]+\]\(([^)]+)\)", prose(page)) if link != other]


def fences(page: Path) -> list[str]:
    return [language for language, _ in FENCE.findall(page.read_text("utf-8"))]


@pytest.mark.parametrize("part", [commands, code, figures, markers, headings, links, fences, inline_commands])
def test_both_languages_have_the_same(part: Callable[[Path], list[Any]]) -> None:
    assert part(ENGLISH)
    assert part(KOREAN) == part(ENGLISH)


def test_tables_have_the_same_shapes_and_numbers() -> None:
    assert len(tables(KOREAN)) == len(tables(ENGLISH))
    for theirs, ours in zip(tables(KOREAN), tables(ENGLISH), strict=True):
        assert [len(row) for row in theirs] == [len(row) for row in ours]
        if ours[0][0] != "data" or "images" not in ours[0]:  # Korean counts images in ten thousands
            for row, other in zip(theirs[1:], ours[1:], strict=True):
                assert sorted(numbers(row)) == sorted(numbers(other))


def numbers(cells: Iterable[str]) -> list[str]:
    return NUMBER.findall(" ".join(cells).replace("~", " to "))


def test_each_page_links_to_the_other() -> None:
    assert f"]({KOREAN.name})" in prose(ENGLISH)
    assert f"]({ENGLISH.name})" in prose(KOREAN)


def test_figures_exist() -> None:
    for name in figures(ENGLISH):
        assert (ROOT / "docs" / name).is_file()


def test_every_study_has_its_place_after_its_command() -> None:
    assert sorted(markers(ENGLISH)) == sorted(STUDIES)
    studied = [given[2] for given in commands(ENGLISH) if given[1] == "study"]
    assert sorted(studied) == sorted(STUDIES)
    text = ENGLISH.read_text("utf-8")
    for name in STUDIES:
        assert text.index(f"vitlab study {name} --quick") < text.index(f"<!-- study: {name} -->")


# ---- numbers, against the package


def parameters(name: str) -> int:
    return sum(p.numel() for p in meta_model(configure(name, {"classes": 1000})).parameters())


def test_variants() -> None:
    rows = table("name", "layers")
    assert {row[0].partition("/")[0] for row in rows} == set(SIZES)
    for name, *sizes, count in rows:
        assert tuple(map(int, sizes)) == SIZES[name.partition("/")[0]]
        assert integer(count) == parameters(name)


def test_hybrids_and_resnets() -> None:
    for name, count, tokens, about in table("name", "parameters", "tokens"):
        config = configure(name, {"classes": 1000})
        assert integer(count) == parameters(name)
        assert int(tokens) == config.length
        if isinstance(config, ViTConfig) and config.stem is not None:
            assert str(config.stem.stages) in about


def test_tokens_of_larger_images() -> None:
    for what, size, tokens in table("", "image", "tokens"):
        model = what.rpartition(" ")[2]
        assert integer(tokens) == configure(model, {"image_size": int(size)}).length
        if what.startswith("ImageNet"):
            recipe = RECIPES[f"imagenet-finetune-{size}"].recipe
            assert (recipe.model, recipe.image_size) == (model, (int(size), int(size)))


def test_images_of_the_data_sets() -> None:
    for name, images, _ in table("data", "images"):
        count, unit = images.split()
        assert unit == "million"
        assert IMAGES[SETS[name.partition(",")[0]]] == pytest.approx(float(count) * 1e6, rel=0.02)


def paper_recipe(model: str, data: str, epochs: int) -> Recipe:
    """The one pre-training recipe of the paper for these."""
    (found,) = [
        entry.recipe
        for entry in RECIPES.values()
        if entry.group == "paper"
        and not entry.finetune
        and (entry.recipe.model, entry.recipe.data, entry.recipe.epochs) == (model, SETS[data], epochs)
    ]
    return found


def test_pretraining_recipes() -> None:
    listed = []
    for models, data, lengths, rate, decay, weight_decay, dropout in table("model", "data", "epochs"):
        for model in models.split(", "):
            for epochs in map(int, lengths.split(", ")):
                recipe = paper_recipe(model, data, epochs)
                listed.append((model, SETS[data], epochs))
                assert (recipe.lr, recipe.decay, recipe.weight_decay) == (float(rate), decay, float(weight_decay))
                assert (recipe.model_settings.get("dropout") or 0.0) == float(dropout)
                assert (recipe.batch, recipe.warmup, recipe.image_size) == (4096, 10_000, (224, 224))
    ours = [entry.recipe for entry in RECIPES.values() if entry.group == "paper" and not entry.finetune]
    found = {(recipe.model, recipe.data, recipe.epochs) for recipe in ours if recipe.objective != "masked"}
    assert sorted(listed) == sorted(found - NOT_IN_THE_TABLE)


def test_finetuning_recipes() -> None:
    names = ("imagenet", "cifar100", "cifar10", "pets", "flowers", "vtab")
    for name, (_, steps, warmup, rates) in zip(names, table("data", "steps"), strict=True):
        entry = RECIPES[f"{name}-finetune"]
        assert (entry.recipe.steps, entry.recipe.warmup) == (integer(steps), integer(warmup))
        assert entry.searched == tuple(map(float, rates.split(", ")))
        assert (entry.recipe.batch, entry.recipe.momentum, entry.recipe.weight_decay) == (512, 0.9, 0)


def test_published_results() -> None:
    *rows, cost = table("", "H/14, JFT")
    assert [same_name(row[0]) for row in rows] == [same_name(name) for name in DATA[: len(rows)]]
    for i, column in enumerate(PUBLISHED[:5], 1):
        for row, name in zip(rows, DATA, strict=False):
            found = [float(value) for value in re.findall(r"\d+\.\d+", row[i])]
            expected = [value for value in column.scores.get(name, ()) if value is not None]
            assert found[: len(expected)] == expected
            assert bool(found) == bool(expected)
        assert float(cost[i].removesuffix("k")) * 1000 == pytest.approx(column.core_days)


def same_name(text: str) -> str:
    return re.sub(r"[(),]", "", text)


def test_costs_and_scores_of_pretraining() -> None:
    rows = [(model, int(epochs), integer(cost), float(score)) for model, epochs, cost, _, score in costs()]
    ours = [(short_name(row.model), row.epochs, row.exaflops, row.imagenet) for row in COMPUTE]
    assert sorted(rows) == sorted(ours)


def costs() -> Rows:
    return table("model", "epochs", "exaFLOPs")


def short_name(model: str) -> str:
    return re.sub(r"^ResNet", "R", model.replace("ViT-", ""))


def test_counted_costs() -> None:
    for model, epochs, paper, count, _ in costs():
        flops = 3 * forward_flops(configure(model, {"classes": 1000})) * IMAGES["jft"] * int(epochs)
        assert integer(count) == round(flops / 1e18)
        if (model, epochs) != ("R50+L/16", "7"):
            assert flops / 1e18 == pytest.approx(integer(paper), rel=0.041 if "x" in model else 0.021)


def test_position_embeddings() -> None:
    rows = {name: cells for name, *cells in table("", "at the stem")}
    assert set(rows) == set(positions.WORDS.values())
    for kind, place, score in positions.CELLS:
        assert rows[positions.WORDS[kind]][list(positions.PLACES).index(place)] == f"{100 * score:.2f}"


def test_optimizers() -> None:
    published = [list(row) for row in optimizer.STUDY.published]
    assert table("model", "optimizer") == published[1:]


def test_groups_of_vtab() -> None:
    counts = [sum(task.group == group for task in TASKS) for group in GROUPS]
    assert f"{counts[0]} natural, {counts[1]} specialized, {counts[2]} structured" in prose(ENGLISH)


def test_the_base_of_the_shape_study() -> None:
    depth, width, mlp, patch = shape.BASE
    assert f"({depth} layers, width {width}, MLP {mlp}, patches of {patch})" in prose(ENGLISH)
    assert f"({depth}층, 너비 {width}, MLP {mlp}, 패치 {patch})" in prose(KOREAN)


def test_own_measurements_are_those_of_the_results() -> None:
    own = (ROOT / "docs" / "results" / "README.md").read_text("utf-8")
    inside = (ROOT / "docs" / "looking-inside.md").read_text("utf-8")
    for number in ("89.50 ± 0.48", "87.79", "62.59 ± 0.11", "9.08 ± 0.59", "69.24 ± 0.45", "21.58 ± 0.65"):
        assert_all([prose(ENGLISH), prose(KOREAN), own], number)
    for number in ("-0.57", "+0.96"):
        assert_all([prose(ENGLISH), prose(KOREAN), inside], number)


def assert_all(texts: Sequence[str], number: str) -> None:
    assert all(number in text for text in texts), number


def integer(text: str) -> int:
    return int(text.replace(",", ""))
