"""Ctrl-C and SIGTERM while workers train: the first asks them to stop, the second stops waiting."""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Counts SIGINT and SIGTERM where they are deferred, instead of letting them raise."""

    def __init__(self) -> None:
        self.received: list[int] = []

    @property
    def exit_code(self) -> int:
        """The exit code of a command that was stopped, by the first signal; 130 without one."""
        return 128 + (self.received[0] if self.received else signal.SIGINT)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Count signals; outside the main thread, which receives them, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self._count_signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _count_signal(self, number: int, _: FrameType | None) -> None:
        self.received.append(number)


def skip_ray_shutdown(exit_code: int) -> None:
    """End this process at its exit without Ray's clean-up, which crashes while a thread still
    waits in Ray. Ray's own processes end when they notice that this one is gone."""

    def end() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)

    atexit.register(end)
