"""How processes find each other: rank 0 gives the others its 128 bytes of NCCL, by TCP."""

from __future__ import annotations

import errno
import math
import selectors
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from time import monotonic, sleep

from cupyfa.errors import DeviceError

ID_BYTES = 128
# And then the rank and the number of ranks, in 4 bytes each; the answer begins with that number.
_GREETING = b"cupyfa.distributed 2 "
_GREETING_BYTES = len(_GREETING) + 8
_GREETING_SECONDS = 1.0  # in which a greeting must be complete
_MOST_GUESTS = 256  # whose greetings rank 0 waits for; more, and the earliest has to go
_PAUSE = 0.05


def shared_id(
    rank: int, ranks: int, make: Callable[[], bytes], address: str, port: int, timeout: float
) -> bytes:
    """The 128 bytes that rank 0 makes.

    address, port: where rank 0 listens, and the others ask. Raises DeviceError if the port is
    taken, if not all ranks come within ``timeout`` seconds, and to two that count others.
    """
    deadline = monotonic() + timeout
    if rank == 0:
        made = make()
        _give(made, ranks, address, port, deadline)
        return made
    return _ask(rank, ranks, address, port, deadline)


def _give(made: bytes, ranks: int, address: str, port: int, deadline: float) -> None:
    """Waits for the other ranks, and gives each the bytes.

    It listens to all who ask at once, so that one who says nothing, or says it slowly, holds up
    nobody else.
    """
    missing = {*range(1, ranks)}
    with _listening(address, port) as server, _Reception(server) as reception:
        while missing:
            for guest, greeting in reception.greetings(deadline):
                rank, count = _read_greeting(greeting)
                if rank in missing or count not in (0, ranks):
                    with suppress(OSError):  # this one asked and went
                        guest.sendall(ranks.to_bytes(4) + made)
                        missing.discard(rank)
                    _require_equal(0, ranks, rank, count)
            if missing and monotonic() > deadline:
                few = ", ".join(map(str, sorted(missing)[:4]))
                raise DeviceError(
                    f"{len(missing)} of {ranks} ranks did not come to {address}:{port} in time, "
                    f"among them {few}; is WORLD_SIZE right, and do they run?"
                )


class _Reception:
    """Those who ask: what each has said, and until when it may say more."""

    def __init__(self, server: socket.socket) -> None:
        server.setblocking(False)
        self._server = server
        self._said: dict[socket.socket, bytes] = {}  # the earliest first
        self._ends: dict[socket.socket, float] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> _Reception:
        return self

    def __exit__(self, *_: object) -> None:
        for guest in [*self._said]:
            self._dismiss(guest)
        self._selector.close()

    def greetings(self, deadline: float) -> Iterator[tuple[socket.socket, bytes]]:
        """Whole greetings that come before something ends; each connection is then closed."""
        first = min([deadline, *self._ends.values()])
        for key, _ in self._selector.select(max(first - monotonic(), 0)):
            if key.fileobj is self._server:
                self._admit()
            elif (guest := key.data) in self._said and self._hear(guest):
                yield guest, self._said[guest]
                self._dismiss(guest)
        for guest in [x for x, end in self._ends.items() if end < monotonic()]:
            self._turn_away(guest)

    def _admit(self) -> None:
        try:
            guest, _ = self._server.accept()
        except OSError:
            return  # this one asked and went
        guest.setblocking(False)
        self._said[guest], self._ends[guest] = b"", monotonic() + _GREETING_SECONDS
        self._selector.register(guest, selectors.EVENT_READ, guest)
        if len(self._said) > _MOST_GUESTS:
            self._turn_away(next(iter(self._said)))

    def _hear(self, guest: socket.socket) -> bool:
        """Whether a guest has said a greeting; one that says something else has to go."""
        try:
            more = guest.recv(_GREETING_BYTES - len(self._said[guest]))
        except BlockingIOError:
            return False
        except OSError:
            more = b""
        self._said[guest] = said = self._said[guest] + more
        if not more or not (_GREETING + said[len(_GREETING) :]).startswith(said):
            self._dismiss(guest)
            return False
        return len(said) == _GREETING_BYTES

    def _turn_away(self, guest: socket.socket) -> None:
        """Resets a connection: a rank that was not heard yet asks again."""
        guest.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._dismiss(guest)

    def _dismiss(self, guest: socket.socket) -> None:
        self._selector.unregister(guest)
        guest.close()
        del self._said[guest], self._ends[guest]


def _listening(address: str, port: int) -> socket.socket:
    try:
        return socket.create_server((address, port), backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            what = f"port {port} of {address} is taken; set MASTER_PORT to another one on all ranks"
        else:
            what = f"rank 0 cannot listen on {address}:{port} ({error}); MASTER_ADDR is its own"
        raise DeviceError(what) from error


def _read_greeting(greeting: bytes) -> tuple[int, int]:
    """The rank that asks, and how many it counts."""
    return int.from_bytes(greeting[-8:-4]), int.from_bytes(greeting[-4:])


def _require_equal(rank: int, ranks: int, other: int, count: int) -> None:
    if ranks != count:
        raise DeviceError(
            f"rank {rank} is one of {ranks} ranks, and rank {other} one of {count}; give the same "
            "WORLD_SIZE to all, and another MASTER_PORT to other programs"
        )


def _left(deadline: float) -> float:
    """Seconds that are left. Raises TimeoutError if there are none."""
    left = deadline - monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _ask(rank: int, ranks: int, address: str, port: int, deadline: float) -> bytes:
    while monotonic() < deadline:
        try:
            with socket.create_connection((address, port), _left(deadline)) as server:
                if server.getsockname() == server.getpeername():
                    raise ConnectionRefusedError  # nobody listens: TCP has connected it to itself
                server.sendall(_GREETING + rank.to_bytes(4) + ranks.to_bytes(4))
                answer = _read(server, 4 + ID_BYTES, deadline)
        except OSError:
            sleep(_PAUSE)  # rank 0 does not listen yet
            continue
        if len(answer) == 4 + ID_BYTES:
            _require_equal(rank, ranks, 0, int.from_bytes(answer[:4]))
            return answer[4:]
        raise DeviceError(
            f"{address}:{port} answers rank {rank}, and not as rank 0 does; is another program "
            "there, or another rank of this number?"
        )
    raise DeviceError(
        f"rank {rank} did not reach rank 0 at {address}:{port} in time; does it run, and are "
        "MASTER_ADDR and MASTER_PORT right?"
    )


def _read(connection: socket.socket, size: int, deadline: float = math.inf) -> bytes:
    """These bytes, or fewer if the other side has closed the connection.

    Raises TimeoutError if they have not all come by the deadline.
    """
    found = b""
    while len(found) < size:
        connection.settimeout(None if deadline == math.inf else _left(deadline))
        if not (more := connection.recv(size - len(found))):
            break
        found += more
    return found
