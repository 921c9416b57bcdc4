"""What one part of the chaos run found: a row of the table in docs/reliability.md."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """`count` things were tried; `failures` describes each that broke a promise, and is empty when all held."""

    name: str
    count: int
    unit: str  # what was counted: requests, kills, inputs, ...
    seconds: float
    failures: list[str] = field(default_factory=list)
    notes: str = ""  # load held, memory drift, coverage reached, ...
