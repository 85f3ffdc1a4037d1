"""``readmit model``: make the demo model, and print its folder."""

from readmit.commands import application

app = application()


@app.command("model")
def command() -> None:
    """Make the demo model from the package that ships it, and print its folder."""
    from readmit.demo_model import main

    main()
