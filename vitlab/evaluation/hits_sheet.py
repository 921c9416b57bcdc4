"""The images that a search found as one picture: a contact sheet."""

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from vitlab.data.images import BrokenImage
from vitlab.data.summary import fit_cell
from vitlab.data.thumbnails import read_small
from vitlab.evaluation.search import Hit
from vitlab.terminal import printable

CELL, GAP, LINE, COLUMNS = 160, 8, 15, 5  # pixels, and cells of a row


def hits_sheet(image: Image.Image, hits: Sequence[Hit]) -> Image.Image:
    """The image that was searched for, then those found, each with its similarity and label."""
    rows = -(-(1 + len(hits)) // COLUMNS)
    across, down = CELL + GAP, CELL + GAP + 2 * LINE
    sheet = Image.new("RGB", (GAP + COLUMNS * across, GAP + rows * down), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    cells = [(fit_cell(image, CELL), "searched for", "")]
    cells += [(read_cell(hit.path), f"{hit.similarity:.3f}", printable(hit.label)) for hit in hits]
    for i, (picture, *lines) in enumerate(cells):
        left, top = GAP + i % COLUMNS * across, GAP + i // COLUMNS * down
        sheet.paste(picture, (left + (CELL - picture.width) // 2, top + (CELL - picture.height) // 2))
        for number, text in enumerate(lines):
            while text and pen.textlength(text, font) > CELL:
                text = text[:-1]
            pen.text((left, top + CELL + number * LINE), text, "black", font)
    return sheet


def read_cell(path: str) -> Image.Image:
    """A small picture of a file; gray where it is not a file, as the rows of packed sets, or not there any more."""
    try:
        return fit_cell(read_small(path, CELL), CELL)
    except BrokenImage:
        return Image.new("RGB", (CELL, CELL), "lightgray")
