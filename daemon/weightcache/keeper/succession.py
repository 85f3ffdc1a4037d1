"""The keeper goes on as another program in the same process: whatever release is installed now.

The new program is tried first (`handover.Trial`), then the keeper waits until no child is about to start or to end, and
executes it. Whatever goes wrong before that leaves the keeper as it was. All that this takes is imported when the
keeper starts: later the files may be another release's, or be replaced just now. Standard library only.
"""

import os
import signal
import time
from typing import TYPE_CHECKING, Final

from weightcache.keeper.console import say
from weightcache.keeper.control import Later
from weightcache.keeper.handover import Handover, Trial, command, set_passing
from weightcache.version import VERSION

if TYPE_CHECKING:
    from weightcache.keeper.keeper import Keeper

REST_LIMIT_S: Final = 60.0
"""How long children that are starting or ending are waited for."""
_LOOK_S: Final = 0.02


class Succession:
    """One attempt of a keeper to become the program that is installed now.

    Args:
        keeper: the keeper.
        later: answered by the new program, or with why there is none.
        python: the interpreter that the new program is installed for.

    Raises:
        OSError: it cannot be tried.
    """

    def __init__(self, keeper: "Keeper", later: Later, python: str) -> None:
        self._keeper = keeper
        self._later = later
        self._python = python
        self._until = time.monotonic() + REST_LIMIT_S
        self.trial = Trial(keeper.loop, python, keeper.file, self._handover(), self._tried)

    def fail(self, why: str) -> None:
        """Go on as the old program."""
        keeper = self._keeper
        keeper.succession = None
        say(f"this keeper (release {VERSION}) goes on: {why}")
        keeper.control.answer(self._later, {"error": f"the old one (release {VERSION}) goes on: {why}"})

    def _tried(self, why_not: str | None) -> None:
        if self._keeper.succession is not self:  # told to end meanwhile
            return
        if why_not is None:
            self._when_at_rest()
        else:
            self.fail(why_not)

    def _when_at_rest(self) -> None:
        keeper = self._keeper
        if keeper.succession is not self:
            return
        moving = [child.name for child in keeper.children if child.state in ("starting", "ending")]
        if not moving:
            self._execute()
        elif time.monotonic() < self._until:
            keeper.loop.after(_LOOK_S, self._when_at_rest)
        else:
            self.fail(f"{', '.join(moving)} would not come to rest within {REST_LIMIT_S:g} s")

    def _execute(self) -> None:
        keeper = self._keeper
        # From here to the new program's handlers: signals wait.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, keeper.SIGNALS)
        if keeper.loop.signalled():
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            keeper.loop.after(0, self._when_at_rest)
            return
        handover = self._handover()
        passing = list(handover.descriptors)
        given = handover.write()
        set_passing(passing, True)
        argv = command(self._python, keeper.file, given)
        try:
            os.execv(argv[0], argv)
        except OSError as error:
            set_passing(passing, False)
            os.close(given)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self.fail(f"the new program cannot be executed: {error}")

    def _handover(self) -> Handover:
        keeper = self._keeper
        return Handover(
            release=VERSION,
            open_files=keeper.open_files,
            lock=keeper.state.lock,
            asker=self._later.client,
            control=keeper.control.hand_over(),
            children={child.name: child.hand_over() for child in keeper.children},
        )
