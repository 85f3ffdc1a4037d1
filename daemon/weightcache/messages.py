"""The messages between a client and the daemon: plain data with a schema, nothing that names code.

A client says `Hello` first. Each request is answered by one reply, except that waiting (`Attach.wait_s`, `Load`)
brings `Loading` messages before it. Descriptors travel beside the message that says how many there are.
"""

from typing import Annotated, Any, Final

import msgspec

PROTOCOL: Final = 1
"""Raised when a message changes so that the older side would misread it. Fields may be added without."""

LOAD_WORKER: Final = "WEIGHTCACHE_LOAD_WORKER"
"""A variable of the processes that `Load` starts: their attaches are part of somebody else's, who counts them."""

Count = Annotated[int, msgspec.Meta(ge=0)]
MAX_WAIT_S: Final = 7 * 86400.0
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)]
"""Also keeps out NaN and infinity, which no clock can wait for."""
Text = Annotated[str, msgspec.Meta(min_length=1)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""What fits every column of the journal."""


Name = Annotated[str, msgspec.Meta(max_length=256)]
"""What goes into every row that the daemon journals for a client."""


class _Message(msgspec.Struct):
    pass


class Hello(_Message, tag="hello"):
    """Who calls, and where in the world its events belong (see `weightcache.journal.Context`)."""

    version: Name
    protocol: int = PROTOCOL
    node: Name | None = None
    slot: Name | None = None
    episode: Name | None = None
    attempt: Number | None = None
    rank: Number | None = None
    traceparent: Name | None = None


class Welcome(_Message, tag="welcome"):
    """The daemon's answer to `Hello`. ``instance`` changes with every daemon process."""

    version: str
    instance: str
    protocol: int = PROTOCOL


class Attach(_Message, tag="attach"):
    """Map the weights of this identity. ``config`` holds the fields of a `CacheConfig`; one unknown here is a miss.

    ``device`` is the UUID of the GPU that will compute with them, which nothing on another one is of use to.
    """

    config: dict[str, Any]
    wait_s: Seconds = 0.0
    device: Name | None = None


class Attached(_Message, tag="attached"):
    """A lease, held as long as the connection. Descriptors: the manifest, then the arena's chunks in order."""

    generation: str
    descriptors: Count


class Missed(_Message, tag="missed"):
    """The request came to nothing, and why: a member of the closed list of miss reasons."""

    reason: str
    message: str
    detail: str | None = None
    expected: str | None = None
    found: str | None = None
    remedy: str | None = None
    differences: list[dict[str, Any]] = []
    data: dict[str, Any] = {}


class Loading(_Message, tag="loading"):
    """Somebody is loading what was asked for."""

    pid: int
    done: Count = 0
    total: Count = 0
    elapsed_s: float = 0.0


class Claim(_Message, tag="claim"):
    """Ask for the right to load and publish one identity; held as long as the connection.

    ``replace`` drops what this identity replaces first: unleased generations of the same model and rank that differ
    or are quarantined. ``bytes`` is what it will take. With ``device``, a GPU's UUID, all that is about that GPU alone.
    """

    config: dict[str, Any]
    bytes: Count = 0
    replace: bool = False
    device: Name | None = None


class Claimed(_Message, tag="claimed"):
    """The claim is yours. ``released`` names the generations that made room."""

    released: list[str] = []


class Progress(_Message, tag="progress"):
    """How far the holder of a claim is. Not answered."""

    done: Count
    total: Count


class Publish(_Message, tag="publish"):
    """Make a generation resident under the claim held. Descriptors: the manifest, then the arena's chunks."""

    descriptors: Count


class Published(_Message, tag="published"):
    """Resident, and stored where the daemon's death does not reach; the publisher now holds a lease."""

    generation: str


class Status(_Message, tag="status"):
    """What is resident, who uses it, and what the daemon is."""


class Explain(_Message, tag="explain"):
    """Would this identity hit, on the GPU with the UUID ``device`` if that is given?"""

    config: dict[str, Any]
    device: Name | None = None


class Release(_Message, tag="release"):
    """Drop a generation, or all with ``generation`` None. Refused while leased unless ``force``."""

    generation: str | None = None
    force: bool = False


class Quarantine(_Message, tag="quarantine"):
    """Hand a generation to nobody (or lift that with ``lift``), with the reason."""

    generation: str
    reason: Text
    lift: bool = False


class Load(_Message, tag="load"):
    """Start an engine process that loads, publishes and exits. Answered by `Loading` until `Done` or `Missed`."""

    argv: Annotated[list[str], msgspec.Meta(min_length=1)]
    env: dict[str, str] = {}
    wait_s: Seconds = 0.0


class Done(_Message, tag="done"):
    """The request is carried out. ``data`` is JSON-compatible."""

    data: dict[str, Any] = {}


Request = Hello | Attach | Claim | Progress | Publish | Status | Explain | Release | Quarantine | Load
Reply = Welcome | Attached | Missed | Loading | Claimed | Published | Done
