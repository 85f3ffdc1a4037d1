"""Engines that commands run by themselves, without a server: to load for the cache, or to say what they load."""

from typing import Annotated, Final, NamedTuple

import typer

from weightcache.errors import ConfigError

Engine = Annotated[str, typer.Option("--engine", help="transformers, or vllm.")]


class Offline(NamedTuple):
    """An engine's modules.

    Attributes:
        worker: loads, publishes and exits.
        census: prints what the engine makes of a checkpoint.
        rank_by_rank: whether a worker is one rank, or all of them.
    """

    worker: str
    census: str
    rank_by_rank: bool


ENGINES: Final = {
    "transformers": Offline(
        "weightcache.integrations.transformers", "weightcache.integrations.transformers_census", rank_by_rank=True
    ),
    "vllm": Offline("weightcache.integrations.vllm_worker", "weightcache.integrations.vllm_census", rank_by_rank=False),
}


def offline(engine: str) -> Offline:
    """What runs an engine without a server.

    Raises:
        ConfigError: ``engine``: there is nothing that does.
    """
    if engine not in ENGINES:
        raise ConfigError(
            "engine",
            f"{engine} cannot be run here without its server",
            expected=" or ".join(ENGINES),
            found=engine,
            remedy="Load with its own command (readmit cache load --command 'COMMAND'), or let the first start after "
            "the upgrade be a cold one; the others hit",
        )
    return ENGINES[engine]
