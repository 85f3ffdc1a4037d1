"""What an operator may choose about the gate."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from yarl import URL

from weightcache.errors import ConfigError


@dataclass(frozen=True)
class SlotSettings:
    """One place where an engine runs.

    Attributes:
        name: the slot's name in journal, metrics and answers.
        url: the engine's base URL, without ``/v1``.
        supervised: whether a keeper journals the engine's processes; only such a process's answers then count. Without
            it the gate takes whatever process listens on the URL's port.
    """

    name: str
    url: str
    supervised: bool = True

    def __post_init__(self) -> None:
        url = URL(self.url)
        if url.scheme != "http" or not url.host or url.path not in ("", "/") or url.query_string:
            raise ConfigError(
                "slot_url",
                f"the URL of slot {self.name} is not an engine's base URL",
                expected="http://HOST:PORT",
                found=self.url,
                remedy="Leave out /v1 and everything behind it",
            )


@dataclass(frozen=True)
class GateSettings:
    """Everything the gate needs to know. Times are in seconds.

    Attributes:
        slots: in order of preference: traffic goes to the first that is ready.
        listen: ``HOST:PORT``; port 0 for any free one.
        node: this node's name in the journal.
        journal: the node's journal, or None to run without (nothing is then supervised).
        runtime_dir: where the keeper's control socket is, or None to ask no keeper for anything.
        cache_socket: the weight cache's socket, or None to ask no daemon for anything.
        probes: the probe file, a folder of them (one for each model that slots may run on), or None.
        unverified_ok: open without golden answers, and say so.
        probe_headers: sent with every golden question, for engines behind a key.
        token_file: holds the token that the page and ``/api`` then ask for, and that orders by TCP need in any case.
        tls_cert: serve HTTPS with this certificate chain (PEM).
        tls_key: its private key (PEM); None where `tls_cert` has it too.
        max_body_bytes: a request's body may not be longer.
        explain_refusals: say in a 503 what the golden questions found. Anybody who is refused then learns them.
        retry_after_s: what ``Retry-After`` says where history says nothing.
        max_in_flight: more requests at a time than this are answered 429.
        max_wait_s: while no slot is ready a request may wait so long for one, unless history says that it takes longer.
        max_queue: so many requests may wait; others are refused at once.
        probe_limit_s: an answer to a golden question is late after this; from a ready engine already after
            `hang_limit_s`, if that is shorter.
        verify_interval_s: between two verifications of an idle slot that is ready.
        eject_wrong: a ready slot is ejected when this many (k) of its last n verifications while idle were wrong.
        eject_window: n.
        eject_last: eject for wrong answers, or none, even when no other slot is ready.
        eject_unanswered: a slot is ejected, though it answers golden questions, when so many different requests in a
            row got no first byte from it within `first_byte_limit_s`, or their clients gave them up after
            `busy_hang_limit_s` or more.
        readmit_after: an ejected slot is ready again after this many good verifications in a row.
        hang_limit_s: an idle engine that gives no answer for this long is taken out of service.
        busy_hang_limit_s: the same for a busy one: late is not wrong. It is busy while requests that came before a
            golden question are under way, unless a signal holds it still.
        start_limit_s: an engine that has given no answer at all so long after its start hangs as well. More than any
            start takes: what is slow must not be begun again and again.
        restart_hung: have the keeper restart a supervised engine that hangs.
        cure_wrong: have the weight cache quarantine resident weights that give wrong answers, and the keeper restart
            the engine, which then loads from disk.
        first_byte_limit_s: an engine must begin its response within this.
        idle_limit_s: no two parts of a response may be further apart than this, nor may its client take nothing of it
            for this long.
        drain_notice_s: after SIGTERM the gate serves on for this long while load balancers learn that it is not ready.
        drain_limit_s: then it refuses, and gives running requests this long to finish.
    """

    slots: tuple[SlotSettings, ...]
    listen: str = "127.0.0.1:8000"
    node: str = ""
    journal: Path | None = None
    runtime_dir: Path | None = None
    cache_socket: Path | None = None
    probes: Path | None = None
    unverified_ok: bool = False
    probe_headers: Mapping[str, str] = field(default_factory=dict)
    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    max_body_bytes: int = 256 << 20
    explain_refusals: bool = False
    retry_after_s: int = 5
    max_in_flight: int = 512
    max_wait_s: float = 0.0
    max_queue: int = 64
    probe_limit_s: float = 10.0
    verify_interval_s: float = 10.0
    eject_wrong: int = 2
    eject_window: int = 3
    eject_last: bool = False
    eject_unanswered: int = 3
    readmit_after: int = 2
    hang_limit_s: float = 30.0
    busy_hang_limit_s: float = 300.0
    start_limit_s: float = 3600.0
    restart_hung: bool = True
    cure_wrong: bool = True
    first_byte_limit_s: float = 600.0
    idle_limit_s: float = 300.0
    drain_notice_s: float = 5.0
    drain_limit_s: float = 60.0

    def __post_init__(self) -> None:
        names = [slot.name for slot in self.slots]
        if not names or len(set(names)) != len(names):
            raise ConfigError(
                "slots",
                "the gate's slots must be told apart",
                expected="one or more slots with different names",
                found=", ".join(names) or "none",
                remedy="Give --slot NAME=URL, or [[slot]] in the configuration",
            )
        if not 1 <= self.eject_wrong <= self.eject_window:
            raise ConfigError(
                "eject",
                "no slot could ever be ejected",
                expected="1 <= eject_wrong <= eject_window",
                found=f"eject_wrong {self.eject_wrong}, eject_window {self.eject_window}",
                remedy="Choose k of n wrong answers, such as 2 of 3",
            )
        if self.eject_unanswered < 2:
            raise ConfigError(
                "eject",
                "a single odd request would take a slot out of service",
                expected="eject_unanswered of 2 or more",
                found=str(self.eject_unanswered),
                remedy="Leave it out: 3 is a good number",
            )

    @property
    def neglect_limit_s(self) -> float:
        """How long a request must have waited for its first byte to count as unanswered."""
        return min(self.first_byte_limit_s, self.busy_hang_limit_s)

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the gate."""
        host, _ = self.address
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of `listen`."""
        host, colon, port = self.listen.rpartition(":")
        if not colon or not port.isdecimal():
            raise ConfigError(
                "listen",
                "the gate's address has no port",
                expected="HOST:PORT",
                found=self.listen,
                remedy="Write for example 127.0.0.1:8000",
            )
        return host.strip("[]") or "0.0.0.0", int(port)
