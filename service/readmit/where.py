"""Where the node that a command asks about keeps its things."""

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from weightcache import paths
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
