"""The client loader: attach a model to resident weights, or load it from disk and say why.

`attach` is the whole of it. It connects, matches the fingerprint, maps and verifies the arena, and binds its tensors
into the model; on a miss it does what the policy for that reason says. Either the model is complete afterwards or it
is what it was before. Only the standard library, torch, safetensors and msgspec are imported here: this runs inside
engines, where import time is recovery time.
"""

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch import nn

from weightcache import memory, messages, paths
from weightcache.arena import FilledArena
from weightcache.attachment import Attachment, Loaded, Loader, Outcome, Progress, ignore_progress
from weightcache.binding import require_no_meta
from weightcache.errors import CacheMiss, ConfigError, ResourceError
from weightcache.fingerprint import CacheConfig
from weightcache.journal import Journal
from weightcache.messages import LOAD_WORKER, MAX_WAIT_S
from weightcache.own_daemon import VISIBLE_GPUS, ensure_daemon
from weightcache.parity import resident_layout
from weightcache.policy import PUBLISHES_AFTER, USELESS, check_overrides, policy_for
from weightcache.publish import Packed, offer, pack
from weightcache.vocabulary import MODES

_PROGRESS_EVERY_S: Final = 0.25


def attach(
    model: nn.Module,
    config: CacheConfig,
    *,
    mode: str = "client",
    load: Loader | None = None,
    check: Callable[[], object] | None = None,
    load_bytes: int = 0,
    load_command: Sequence[str] | None = None,
    socket: Path | None = None,
    journal: Journal | None = None,
    policies: Mapping[str, str] | None = None,
    verify: float | None = None,
    device: int | None = None,
    wait_s: float = 1800.0,
    detach: bool = False,
    progress: Progress | None = None,
    origin: str | None = None,
    barred: CacheMiss | None = None,
) -> Outcome:
    """Give a model its weights.

    Args:
        model: built on the meta device.
        config: the identity of the weights it needs.
        mode: ``client`` maps from a running daemon and falls back to disk; ``daemon`` starts one if need be, has it
            load, and raises on any other miss; ``off`` reads from disk.
        load: fills the model from disk; without it a miss raises.
        check: looks at what ``load`` would read, before resident weights are given up for it; what it raises ends this.
        load_bytes: what ``load`` will take, compared with free memory before any fallback.
        load_command: an engine command that loads, publishes and exits, for mode ``daemon``.
        socket: the daemon's socket; `weightcache.paths.socket_path` if None.
        journal: where parts of ``load_weights`` and the lookup go; the environment's if None.
        policies: what to do by reason, in place of the defaults of the mode.
        verify: share of the tensors whose every byte is checked against the manifest before binding; if None, all of
            them on a GPU and none on the CPU, where sealed bytes cannot change.
        device: CUDA ordinal for weights on a GPU; torch's current device if None.
        wait_s: limit for somebody else's load, and for the daemon's.
        detach: let a daemon started here outlive this process.
        progress: told about the load this waits for.
        origin: where the bytes come from, shown to operators; the config's model path if None.
        barred: a miss that is known beforehand (weights that may not be shared); the policy for its reason applies.

    Returns:
        What happened. The lease lives as long as the model does.

    Raises:
        CacheMiss: the policy says ``fail``, or there is no ``load``; the model is unchanged.
        CheckpointError: the files that ``load`` reads are bad.
        ConfigError: the mode or a policy is unknown, or mode ``off`` has no ``load``.
    """
    if mode not in MODES:
        raise ConfigError("mode", f"{mode!r} is no mode", expected=", ".join(MODES), found=mode)
    if not 0 <= wait_s <= MAX_WAIT_S:
        raise ConfigError("wait_s", "nobody can wait that long", expected=f"0 to {MAX_WAIT_S} s", found=wait_s)
    check_overrides(policies)
    attachment = Attachment(
        model,
        config if mode == "off" else resident_layout(config),
        mode,
        socket=socket or (paths.socket_path() if mode != "off" else Path()),
        journal=journal or Journal.from_environment(),
        verify=verify,
        device=device,
    )
    if mode == "off":
        return attachment.load_privately(load)
    recovery = _Recovery(attachment, load, check, load_bytes, policies, wait_s, progress, origin)
    with _on(device):
        return recovery.run(load_command, detach, barred)


def _on(device: int | None) -> contextlib.AbstractContextManager[object]:
    """Whose context, and so whose kernels and streams, the driver's calls are for."""
    return contextlib.nullcontext() if device is None or not torch.cuda.is_available() else torch.cuda.device(device)


class _Recovery:
    """What one attach does about misses."""

    def __init__(
        self,
        attachment: Attachment,
        load: Loader | None,
        check: Callable[[], object] | None,
        load_bytes: int,
        policies: Mapping[str, str] | None,
        wait_s: float,
        progress: Progress | None,
        origin: str | None,
    ) -> None:
        self.attachment = attachment
        self.outcome = attachment.outcome
        self.load = load
        self.check = check
        self.load_bytes = load_bytes
        self.policies = policies
        self.wait_s = wait_s
        self.progress = progress
        self.origin = origin or attachment.config.model_path
        self._counted = LOAD_WORKER in os.environ
        self._reported = 0.0

    def run(self, load_command: Sequence[str] | None, detach: bool, barred: CacheMiss | None) -> Outcome:
        try:
            try:
                if barred is not None:
                    raise barred
                if self.outcome.mode == "daemon":
                    ensure_daemon(self.attachment.socket, self.attachment.journal, detach=detach)
                self.attachment.map(0.0, None)
            except CacheMiss as miss:
                # What was mapped is held by the frames of the error: it must go before another copy is made.
                traceback.clear_frames(miss.__traceback__)
                self._miss(miss if barred else self._without_export() or miss, load_command)
            else:
                self.outcome.path = "hit"
                facts = {"mode": self.outcome.mode, "generation": self.outcome.generation, "bytes": self.outcome.bytes}
                self._count("hit", facts)
        except BaseException:
            self.attachment.disconnect()
            raise
        return self.outcome

    def _count(self, result: str, facts: Mapping[str, object]) -> None:
        """Journal what this attach came to, once."""
        if not self._counted:
            device = {"device": self.attachment.gpu} if self.attachment.gpu else {}
            config = self.attachment.config.to_dict()
            self.attachment.journal.append("lookup", result, {**facts, **device, "config": config})
        self._counted = True

    def _count_miss(self, miss: CacheMiss, policy: str) -> None:
        outcome = self.outcome
        if outcome.reason is None:
            outcome.reason, outcome.detail, outcome.message = miss.reason, miss.detail, str(miss)
            outcome.differences = miss.data.get("differences", [])
        self._count("miss", {"mode": outcome.mode, "policy": policy, **miss.to_dict()})

    def _policy(self, reason: str) -> str:
        return policy_for(reason, self.outcome.mode, self.policies)

    def _miss(self, miss: CacheMiss, load_command: Sequence[str] | None) -> None:
        policy = self._policy(miss.reason)
        if policy == "wait":
            self._count_miss(miss, policy)
            after = self._wait(miss, load_command)
            if after is None:
                return
            if self.outcome.mode == "daemon":
                raise after
            miss = after
        if policy == "fail" or self.load is None:
            self._count_miss(miss, "fail")
            raise miss
        self._fall_back(miss, policy)

    def _wait(self, miss: CacheMiss, load_command: Sequence[str] | None = None) -> CacheMiss | None:
        """Wait for the load that is under way, or have the daemon start one; None once the weights are mapped."""
        try:
            if miss.reason != "daemon_loading":
                if not load_command:
                    return miss
                self._have_it_loaded(load_command)
            self.attachment.map(self.wait_s, self.progress)
        except CacheMiss as after:
            traceback.clear_frames(after.__traceback__)
            return after
        return None

    def _have_it_loaded(self, load_command: Sequence[str]) -> None:
        gpus = {name: os.environ[name] for name in VISIBLE_GPUS if name in os.environ}
        request = messages.Load(argv=list(load_command), env=gpus, wait_s=self.wait_s)
        replies = self.attachment.connect().ask_for_all(request, timeout_s=self.wait_s + 10.0)
        with self.attachment.part("read"):
            for reply, _ in replies:
                if not isinstance(reply, messages.Loading):
                    return
                if self.progress:
                    self.progress(reply.done, reply.total)

    def _fall_back(self, miss: CacheMiss, policy: str) -> None:
        """Load from disk; publish where the daemon answered and there is room, else stay private and say why."""
        assert self.load is not None
        claimed = False
        if miss.reason in PUBLISHES_AFTER:
            replace = policy == "replace" or (miss.reason in USELESS and self._is_short())
            if replace:
                self._check(miss, policy)
            refused = self._claim(replace)
            if refused and refused.reason == "daemon_loading" and self._policy("daemon_loading") == "wait":
                # Somebody else was quicker: one load is enough for all.
                self._count_miss(miss, policy)
                if self._wait(refused) is None:
                    return
                refused = self._claim(replace)
            claimed = refused is None
            self.outcome.private_because = str(refused) if refused else None
        self._require_memory(miss)
        self._count_miss(miss, policy)
        if claimed and not self.attachment.on_gpu and self._available().bytes < 2 * self.load_bytes:
            self.outcome.private_because = "publishing would need memory for a second copy while it copies"
            claimed = False
        if not claimed:
            self.attachment.disconnect()
        attachment = self.attachment
        with attachment.part("read"), self._loading(claimed):
            told = self.load(self._report if claimed else ignore_progress)
        loaded = told if isinstance(told, Loaded) else Loaded(told)
        with contextlib.ExitStack() as held:
            if loaded.arena is not None:
                held.callback(loaded.arena.close)  # its memory stays for as long as the model is on it
            require_no_meta(attachment.model)
            if attachment.config.checkpoint_digest is None:
                attachment.config = msgspec.structs.replace(attachment.config, checkpoint_digest=loaded.digest)
            if claimed and attachment.config.checkpoint_digest is None:
                self.outcome.private_because = "nothing could ever match them: nobody knows the checkpoint's digest"
                attachment.disconnect()
            elif claimed:
                self._publish(loaded.arena)

    def _check(self, miss: CacheMiss, policy: str) -> None:
        """Look at the files while what they are to replace is still there: it serves whoever goes back to it."""
        if self.check is not None:
            try:
                self.check()
            except BaseException:
                self._count_miss(miss, policy)
                raise

    def _claim(self, replace: bool) -> CacheMiss | None:
        """Ask for the right to load and publish; why it is not given, or None."""
        attachment = self.attachment
        try:
            self._require_export(prove=True)
            asked = attachment.config.to_dict()
            request = messages.Claim(config=asked, bytes=self.load_bytes, replace=replace, device=attachment.gpu)
            attachment.connect().ask(request, messages.Claimed)
        except CacheMiss as refused:
            return refused
        return None

    def _is_short(self) -> bool:
        return self.load_bytes > self._available().bytes

    def _require_memory(self, miss: CacheMiss) -> None:
        there = self._available()
        if self.load_bytes <= there.bytes:
            return
        short = ResourceError(
            f"no memory for a second copy of the weights beside what is resident ({miss.reason})",
            expected=f"{self.load_bytes} bytes available under {there.limit}",
            found=f"{there.bytes} bytes",
            remedy="Release the resident generation (readmit cache release) and start again",
            needed=self.load_bytes,
            available=there.bytes,
            limit=there.limit,
            because=miss.to_dict(),
        )
        self._count_miss(short, "fail")
        raise short from miss

    def _require_export(self, *, prove: bool) -> None:
        if self.attachment.on_gpu:
            from weightcache.arena.cuda_vmm import require_export

            require_export(self.attachment.device, prove=prove)

    def _without_export(self) -> CacheMiss | None:
        """The miss of a GPU whose memory cannot be handed over; it is no use telling such a one what else is amiss."""
        try:
            self._require_export(prove=False)
        except CacheMiss as found:
            return found
        return None

    def _loading(self, claimed: bool) -> contextlib.AbstractContextManager[None]:
        """What a load happens in whose weights will move to an arena."""
        if not claimed or not self.attachment.on_gpu:
            return contextlib.nullcontext()
        from weightcache.arena.cuda_segments import growing

        return growing()

    def _available(self) -> memory.Available:
        if self.attachment.on_gpu:
            from weightcache import device

            return device.available(self.attachment.device)
        return memory.available()

    def _report(self, done: int, total: int) -> None:
        now = time.monotonic()
        connection = self.attachment.connection
        if connection is not None and (now - self._reported > _PROGRESS_EVERY_S or done == total):
            self._reported = now
            connection.tell(messages.Progress(done=done, total=total))

    def _publish(self, arena: FilledArena | None) -> None:
        attachment, journal = self.attachment, self.attachment.journal
        journal.append("publish", "begin", {"config": attachment.config.to_dict()})
        try:
            with attachment.part("publish"):
                packed = pack(
                    attachment.model,
                    attachment.config,
                    origin=self.origin,
                    slot=journal.context.slot,
                    filled=arena,
                )
            with contextlib.closing(packed):
                with attachment.part("publish"):
                    generation = self._offer(packed)
                attachment.adopt(generation, packed)
        except CacheMiss as refused:
            # The engine has its weights and can serve; what did not fit stays private, and says so.
            self.outcome.private_because = str(refused)
            journal.append("publish", "failed", refused.to_dict())
            attachment.disconnect()

    def _offer(self, packed: Packed) -> str:
        try:
            return offer(self.attachment.connect(), packed)
        except CacheMiss as died:
            if died.reason != "daemon_died":
                raise
            # The daemon was killed while this engine loaded. Its successor knows nothing of the claim.
            self.attachment.disconnect()
            refused = self._claim(replace=False)
            if refused is not None:
                raise refused from died
            return offer(self.attachment.connect(), packed)
