"""What the commands' tables look like."""

from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from readmit.quantiles import QUANTILES, needed


def table(*columns: str) -> Table:
    """A table without lines: names to the left, everything else to the right."""
    made = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    return made


def titled(title: str, shown: Table) -> RenderableType:
    """A table under its title."""
    return Group(Text(title, style="bold"), shown)


def quantile(name: str, value: float | str, seconds: Callable[[float], str]) -> str:
    """A quantile's cell: how it is written, or how many recoveries it needs."""
    return f"needs {needed(QUANTILES[name])}" if isinstance(value, str) else seconds(value)
