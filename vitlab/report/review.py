"""The section "Worth a look": the first images of each kind in a run's review.csv, as cards with thumbnails."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vitlab.data.review_file import Finding, name_key
from vitlab.data.source import Data, ImageSource
from vitlab.evaluation.review import COPY, LABEL, OUTLIER, TWO_LABELS, TWO_SPLITS
from vitlab.report.images import square

SHOWN = 12  # cards of each kind
SIDE = 160  # pixels of a thumbnail
KINDS = (
    ((LABEL,), "Labels that may be wrong", "Models that had not seen the image find another class more likely."),
    (
        (TWO_LABELS, TWO_SPLITS, COPY),
        "Copies",
        "The same photo twice, in whatever size. Of two labels one is wrong; in two splits it makes the test too easy.",
    ),
    ((OUTLIER,), "Unlike the others", "Far from every class: perhaps not of this set at all."),
)


@dataclass(frozen=True)
class Look:
    """A finding with its images as data: URLs; None where there is none, or it cannot be read."""

    finding: Finding
    image: str | None
    other: str | None


@dataclass(frozen=True)
class LookGroup:
    """The findings of one kind: how many there are, and the first of them."""

    title: str
    about: str
    count: int
    looks: list[Look]


def worth_a_look(findings: Sequence[Finding], data: Data) -> list[LookGroup]:
    """The groups that have findings, for the page; only the images that are shown are read."""
    groups = []
    places = find_places(findings, data) if findings else {}
    for problems, title, about in KINDS:
        own = [finding for finding in findings if finding.problem in problems]
        if own:
            looks = [Look(f, thumbnail(places, f.path), thumbnail(places, f.other)) for f in own[:SHOWN]]
            groups.append(LookGroup(title, about, len(own), looks))
    return groups


def find_places(findings: Iterable[Finding], data: Data) -> dict[str, tuple[ImageSource, int]]:
    """Where the images of findings are in the data, by name_key."""
    wanted = {name_key(name) for finding in findings for name in (finding.path, finding.other) if name}
    named = ((name_key(s.name(i)), (s, i)) for s in data.splits.values() for i in range(len(s)))
    return {name: place for name, place in named if name in wanted}


def thumbnail(places: dict[str, tuple[ImageSource, int]], name: str) -> str | None:
    """The image of that name as a small square."""
    return square(*places[name_key(name)], SIDE) if name and name_key(name) in places else None
