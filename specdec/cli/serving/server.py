"""`Server`: uvicorn with the application, and how it ends: by a signal, by its caller, and always in time."""

from __future__ import annotations

import copy
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from threading import Event, Lock, Thread
from types import FrameType
from typing import NoReturn

import uvicorn

from specdec.cli.serving import sockets as listening
from specdec.cli.serving.app import Service
from specdec.cli.serving.prompts import PromptReader
from specdec.cli.serving.worker import Worker

DEADLINE = 1.5  # seconds from a signal to the end of the process
GRACE = 1  # seconds for open connections to end
ROUND = 0.3  # seconds for the model's current round to end; a prefill may take longer
START = 60.0  # seconds for uvicorn to start


class Server:
    """A server that listens, with its model loaded. `serve` makes one.

    Args:
        service: answers requests.
        worker: runs the model.
        reader: reads prompts.
        sockets: where to listen.

    Attributes:
        port: number of the port.

    Example:
        ```python
        server = serve(path, SpeculativeGenerator, port=0, non_blocking=True)
        print(server.port)
        server.kill_server()
        ```
    """

    def __init__(self, service: Service, worker: Worker, reader: PromptReader, sockets: list[socket.socket]):
        self.port: int = sockets[0].getsockname()[1]
        self._worker, self._reader, self._sockets = worker, reader, sockets
        logs = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
        logs["handlers"]["access"]["stream"] = "ext://sys.stderr"  # standard output is for the report
        self._uvicorn = _Uvicorn(uvicorn.Config(service.app(), log_config=logs, timeout_graceful_shutdown=GRACE))
        self._thread: Thread | None = None
        self._farewell_lock, self._said = Lock(), False

    def run(self, farewell: Callable[[], None] | None = None) -> int:
        """Answer requests until a signal arrives, and return its number; 0 if `kill_server` ended the server.

        Args:
            farewell: called once at the end, such as to print a report. If it is given, the process ends within
                `DEADLINE` seconds of a signal, also if the model computes or a client does not let go.
        """
        if farewell is not None:
            self._uvicorn.at_signal = lambda number: self._enforce(number, farewell)
        else:
            self._uvicorn.at_signal = lambda number: self._worker.stop()
        try:
            self._uvicorn.run(self._sockets)
        finally:
            ended = self._close(ROUND)
            if farewell is not None:
                self._say(farewell)
        if farewell is not None and not ended:
            _leave(self._uvicorn.signal)
        return self._uvicorn.signal

    def start(self) -> None:
        """Answer requests in a thread, and return when the server is ready."""
        self._thread = Thread(target=self.run, name="server", daemon=True)
        self._thread.start()
        if not self._uvicorn.ready.wait(START):
            raise RuntimeError(f"the server did not start within {START:.0f} seconds")

    def kill_server(self) -> None:
        """End a server that runs in a thread: requests that are not answered yet fail with status 503."""
        self._uvicorn.should_exit = True
        self._worker.stop()
        if self._thread is not None:
            self._thread.join(GRACE + START)
        self._close(START)

    def _close(self, seconds: float) -> bool:
        self._worker.stop()
        self._reader.close()
        listening.close(self._sockets)
        return self._worker.join(seconds)

    def _enforce(self, number: int, farewell: Callable[[], None]) -> None:
        """End the process at the deadline. The main thread may be waiting for a client or a thread by then."""
        self._worker.stop()
        Event().wait(DEADLINE)
        self._say(farewell)
        _leave(number)

    def _say(self, farewell: Callable[[], None]) -> None:
        with self._farewell_lock:
            if not self._said:
                self._said = True
                farewell()


class _Uvicorn(uvicorn.Server):
    """uvicorn, which returns after a signal: the caller chooses the exit code.

    Attributes:
        signal: number of the first signal; 0 before.
        at_signal: called with it, in a thread of its own: a signal handler must not wait for a lock.
        ready: set when requests are answered.
    """

    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self.signal, self.ready = 0, Event()
        self.at_signal: Callable[[int], None] = lambda number: None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.signal == 0:
            self.signal = sig
            Thread(target=self.at_signal, args=(sig,), daemon=True).start()
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            host, port = each.getsockname()[:2]
            place = f"[{host}]" if ":" in host else host
            logging.getLogger("uvicorn.error").info("Uvicorn running on http://%s:%d (Ctrl-C to quit)", place, port)
        self.ready.set()


def _leave(number: int) -> NoReturn:
    """End the process without waiting for threads that compute. Exit code as shells give it."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(128 + number)
