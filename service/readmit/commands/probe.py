"""``readmit probe``: record golden answers from a good load, and check an engine against them."""

import asyncio
import os
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import aiohttp
import msgspec
import typer

from readmit.commands import Json, application
from readmit.probes import DEFAULT_PROMPTS, Interrogation, ProbeSet, Verdict, now_iso, record, served_model, told
from readmit.served_weights import served_weights
from readmit.where import ConfigOption, Where
from weightcache.errors import ConfigError

app = application(no_args_is_help=True, help="Golden answers: record them from a good load, check an engine with them.")

_LOOK_S: Final = 0.5
Url = Annotated[str, typer.Argument(help="The engine's base URL, such as http://127.0.0.1:8101.")]
Header = Annotated[list[str] | None, typer.Option(help="Sent with every question, as 'Name: value'.")]


class By(StrEnum):
    """What is compared."""

    TEXT = "text"
    TOKENS = "tokens"
    TOKEN_IDS = "token-ids"
    LOGPROBS = "logprobs"


@app.command("record")
def record_command(
    url: Url,
    out: Annotated[Path, typer.Option(help="The probe file to write.")] = Path("probes.json"),
    prompt: Annotated[list[str] | None, typer.Option(help="Repeat for several; a few built-in ones if absent.")] = None,
    model: Annotated[str | None, typer.Option(help="The served model's name; the first listed if absent.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The length of an answer, in tokens.")] = 8,
    by: Annotated[By, typer.Option(help="What is compared later.")] = By.TEXT,
    tolerance: Annotated[float, typer.Option(min=0, help="For --by logprobs, in nats.")] = 0.5,
    repeat: Annotated[int, typer.Option(min=1, help="How often an answer must come out the same.")] = 3,
    limit: Annotated[float, typer.Option(help="Seconds an answer may take.")] = 120.0,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for an engine that does not answer yet.")] = 30.0,
    checkpoint_digest: Annotated[
        str | None, typer.Option(help="Content identity of the checkpoint; as this node's journal knows it, if absent.")
    ] = None,
    quant_method: Annotated[str | None, typer.Option(help="The checkpoint's quantisation; the same.")] = None,
    engine: Annotated[str | None, typer.Option(help="What answers, for people.")] = None,
    header: Header = None,
    config: ConfigOption = None,
) -> None:
    """Record golden answers from an engine that is known to be good."""

    where, folder = Where.find(config), out.absolute().parent
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            "probe_file",
            f"{out} cannot be written",
            expected="a folder that this user may write in",
            found=str(folder) if folder.is_dir() else "none",
            remedy="Name another place with --out",
        )

    async def recorded() -> ProbeSet:
        headers = _headers(header)
        name = model or await _served(url, headers, wait)
        probes = await record(
            url,
            prompt or DEFAULT_PROMPTS,
            model=name,
            max_tokens=max_tokens,
            repeat=repeat,
            by=by.value,
            tolerance=tolerance,
            limit_s=limit,
            headers=headers,
        )
        weights = served_weights(url, where)
        return ProbeSet(
            model=name,
            probes=probes,
            checkpoint_digest=checkpoint_digest or weights.get("checkpoint_digest"),
            quant_method=quant_method or weights.get("quant_method"),
            recorded_at=now_iso(),
            engine=engine,
        )

    try:
        probe_set = asyncio.run(recorded())
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _no_answer(url, error) from error
    probe_set.save(out)
    of = f", of checkpoint {probe_set.checkpoint_digest}" if probe_set.checkpoint_digest else ""
    count = len(probe_set.probes)
    answers = f"{count} golden answer{'s' if count != 1 else ''}"
    typer.echo(f"{out}: {answers} of {probe_set.model}{of}, probe set {probe_set.digest}")


@app.command("verify")
def verify_command(
    url: Url,
    file: Annotated[Path, typer.Argument(help="The probe file.")],
    model: Annotated[str | None, typer.Option(help="The served model's name, if not the file's.")] = None,
    limit: Annotated[float, typer.Option(help="Seconds an answer may take.")] = 30.0,
    as_json: Json = False,
    header: Header = None,
) -> None:
    """Put every question to an engine. Exit code 1 unless all answers are correct."""
    probe_set = ProbeSet.load(file)
    engine = Interrogation(url, model or probe_set.model, _headers(header))

    async def verdicts() -> list[Verdict]:
        return [await engine.put(probe, limit) for probe in probe_set.probes]

    found = asyncio.run(verdicts())
    correct = all(verdict.result == "correct" for verdict in found)
    if as_json:
        report = {"correct": correct, "probe_set": probe_set.digest, "verdicts": found}
        typer.echo(msgspec.json.encode(report).decode())
    else:
        for verdict in found:
            typer.echo(f"{verdict} ({verdict.seconds:.3f} s)")
    raise typer.Exit(0 if correct else 1)


async def _served(url: str, headers: dict[str, str], wait_s: float) -> str:
    """The name of the model, once the engine lists it.

    Raises:
        aiohttp.ClientError: it does not within ``wait_s``.
    """
    deadline, told = time.monotonic() + wait_s, False
    while True:
        try:
            return await served_model(url, headers)
        except (aiohttp.ClientError, TimeoutError):
            if time.monotonic() >= deadline:
                raise
        if not told:
            typer.echo(f"waiting up to {wait_s:g} s for the engine at {url}", err=True)
            told = True
        await asyncio.sleep(_LOOK_S)


def _headers(lines: Sequence[str] | None) -> dict[str, str]:
    headers = {}
    for line in lines or ():
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise ConfigError(
                "header", "a header has no name", expected="Name: value", found=repr(line), remedy="Write it that way"
            )
        headers[name.strip()] = value.strip()
    return headers


def _no_answer(url: str, error: Exception) -> ConfigError:
    return ConfigError(
        "no_answer",
        f"the engine at {url} gives no answer to record",
        expected="a completion",
        found=told(error),
        remedy="Start the engine and wait until it serves, then record again",
        url=url,
    )
