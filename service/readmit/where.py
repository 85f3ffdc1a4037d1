"""Where the node that a command asks about keeps its things."""

import os
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
            ConfigError: the configuration cannot be used; ``not_ours``: this user may not look into a folder.
        """
        if config is None and not os.path.exists("readmit.toml"):
            state_dir = paths.state_dir(create=False)
            found = cls(paths.runtime_dir(create=False), state_dir, paths.journal_path(), Objectives())
        else:
            from readmit.config import load  # not at the top: it costs more than all the rest of a status

            node = load(config)
            found = cls(node.node.runtime_dir, node.node.state_dir, node.journal, node.objectives)
        for folder in (found.runtime_dir, found.journal.parent):
            check_ours(folder)
        return found

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


def check_ours(folder: Path) -> None:
    """Find out whether this user may look into a folder, if it is there.

    Raises:
        ConfigError: ``not_ours``, with the user whose node it is.
    """
    try:
        owner = folder.stat().st_uid
    except PermissionError:
        owner = None
    except OSError:
        return
    if owner is not None and os.access(folder, os.R_OK | os.X_OK):
        return
    raise ConfigError(
        "not_ours",
        f"this user may not look into {folder}",
        expected=None if owner is None else f"uid {owner}",
        found=f"uid {os.geteuid()}",
        remedy="Run the command as the user whose node it is: sudo -u USER",
        path=str(folder),
    )
