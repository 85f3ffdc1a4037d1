"""Where the node that a command asks about keeps its things."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from weightcache import paths
from weightcache.errors import ConfigError
from weightcache.journal import Context, Journal
from weightcache.slo import Objectives

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="The node's configuration; readmit.toml if there is one here.")
]


class Where(NamedTuple):
    """A node's folders and journal. Nothing is created."""

    runtime_dir: Path
    state_dir: Path
    journal: Path
    objectives: Objectives

    @classmethod
    def find(cls, config: Path | None) -> "Where":
        """By a configuration, or by the environment and the defaults without one.

        Raises:
            ConfigError: the configuration cannot be used.
        """
        if config is None and not Path("readmit.toml").exists():
            state_dir = paths.state_dir(create=False)
            return cls(paths.runtime_dir(create=False), state_dir, paths.journal_path(), Objectives())
        from readmit.config import load  # not at the top: it costs more than all the rest of a status

        node = load(config)
        return cls(node.node.runtime_dir, node.node.state_dir, node.journal, node.objectives)

    @contextmanager
    def reading(self) -> Iterator[Journal]:
        """The journal, to be read in the block.

        Raises:
            ConfigError: ``journal_unreadable``: it is damaged, or not to be opened.
        """
        journal = Journal(self.journal, Context.from_environment())
        try:
            yield journal
        except sqlite3.Error as error:
            raise ConfigError(
                "journal_unreadable",
                f"the journal {self.journal} cannot be read",
                found=str(error),
                remedy="A running weight cache daemon sets a damaged journal aside and goes on with what can be read",
            ) from error
        finally:
            with suppress(sqlite3.Error):
                journal.close()
