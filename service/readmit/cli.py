"""``readmit``: one command, whose parts are imported only when they are asked for."""

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

if TYPE_CHECKING:
    from weightcache.errors import WeightCacheError


class Entry(NamedTuple):
    """One subcommand. ``plain``: its module parses the arguments itself, by ``main(argv)``, without typer."""

    module: str
    help: str
    plain: bool = False


COMMANDS: Final = {
    "up": Entry("readmit.commands.up", "Run a node: weight cache, engines and gate."),
    "run": Entry("readmit.commands.run", "Keep one engine running."),
    "status": Entry("readmit.commands.status", "What runs here now."),
    "restart": Entry("readmit.commands.restart", "Restart a slot on purpose."),
    "upgrade": Entry("readmit.commands.upgrade", "Replace every process by the installed release, under traffic."),
    "preempt": Entry("readmit.commands.preempt", "Have an engine yield its place, and come back."),
    "drain": Entry("readmit.commands.drain", "Send a slot's requests elsewhere, or take it back."),
    "drill": Entry("readmit.commands.drill", "Kill what serves, and measure the recoveries."),
    "logs": Entry("readmit.commands.logs", "What a slot's engine printed."),
    "report": Entry("readmit.commands.report", "Recoveries: how long, and why."),
    "probe": Entry("readmit.commands.probe", "Golden answers: record and check them."),
    "cache": Entry("readmit.commands.cache", "The weight cache daemon."),
    "gate": Entry("readmit.commands.gate", "Let in traffic for correct answers only."),
    "engine": Entry("readmit.engine", "The reference engine.", plain=True),
    "model": Entry("readmit.commands.model", "Make the demo model."),
    "config": Entry("readmit.commands.config", "Check or show a node's configuration."),
}
STATUSES: Final = (
    "Exit status: 0 good; 1 the answer is no (an answer was wrong, a recovery failed, weights would be missed, no "
    "keeper runs); 2 usage, settings, or nobody to ask: the message says what to do, as JSON with --json; of readmit "
    "engine 78: no restart helps."
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``readmit``; ends the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None and arguments[:1] == ["gate"]:
        from readmit.gate import huge_pages

        huge_pages.settle()
    entry = COMMANDS.get(arguments[0]) if arguments else None
    if entry is not None and entry.plain:
        # An engine's start is recovery time: it does not wait for typer.
        import_module(entry.module).main(arguments[1:])
        sys.exit(0)

    from weightcache.errors import WeightCacheError

    try:
        _group().main(arguments, prog_name="readmit")
    except WeightCacheError as error:
        print(_told(error, as_json="--json" in arguments), file=sys.stderr)
        sys.exit(2)


def _told(error: "WeightCacheError", *, as_json: bool) -> str:
    return json.dumps(error.to_dict()) if as_json else f"readmit: {error}"


def _group() -> Any:
    """The root command."""
    import typer
    from typer.core import TyperCommand, TyperGroup

    class LazyGroup(TyperGroup):
        """Knows all commands by name and help, and imports the one that is called."""

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            name, found, rest = super().resolve_command(ctx, args)
            entry = COMMANDS.get(str(name))
            if entry is None or entry.plain:  # a word that is being completed, or a command without typer's options
                return name, found, rest
            command: Any = typer.main.get_command(import_module(entry.module).app)
            command.name, command.help = name, command.help or entry.help
            return name, command, rest

    app = typer.Typer(
        cls=LazyGroup,
        no_args_is_help=True,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        epilog=STATUSES,
    )

    def version(wanted: bool) -> None:
        from weightcache.version import VERSION

        if wanted:
            typer.echo(f"readmit {VERSION}")
            raise typer.Exit

    @app.callback()
    def root(
        _: Annotated[
            bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version and exit.")
        ] = False,
    ) -> None:
        """Keep an inference engine's weights alive when it dies, and let traffic in only when it answers correctly."""

    group: Any = typer.main.get_command(app)
    group.commands = {name: TyperCommand(name, help=entry.help) for name, entry in COMMANDS.items()}
    return group


if __name__ == "__main__":
    main()
