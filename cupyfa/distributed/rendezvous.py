"""How processes find each other: rank 0 gives the others its 128 bytes of NCCL, by TCP."""

from __future__ import annotations

import errno
import math
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, sleep

from cupyfa.errors import DeviceError

ID_BYTES = 128
# And then the rank and the number of ranks, in 4 bytes each; the answer begins with that number.
_GREETING = b"cupyfa.distributed 2 "
_GREETING_BYTES = len(_GREETING) + 8
_GREETING_SECONDS = 1.0  # in which a greeting must be complete
_MOST_GUESTS = 256  # who are heard at a time
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

    Each who asks is heard in a thread of its own, so that one who says nothing, or says it slowly,
    holds up nobody else.
    """
    missing, lock = {*range(1, ranks)}, threading.Lock()
    room = threading.Semaphore(_MOST_GUESTS)
    wrong: list[tuple[int, int]] = []

    def answer(guest: socket.socket) -> None:
        with guest:
            found = _hear(guest)
            room.release()
            if found is None:
                return
            rank, count = found
            with lock:
                if rank in missing or count not in (0, ranks):
                    with suppress(OSError):  # this one asked and went
                        guest.sendall(ranks.to_bytes(4) + made)
                        missing.discard(rank)
                    if count != ranks:
                        wrong.append(found)

    with _listening(address, port) as server:
        server.settimeout(_PAUSE)
        while missing and not wrong:
            with suppress(OSError):  # nobody asks, or one asked and went
                guest, _ = server.accept()
                room.acquire()
                threading.Thread(target=answer, args=(guest,), daemon=True).start()
            if (late := [*missing]) and monotonic() > deadline:
                few = ", ".join(map(str, sorted(late)[:4]))
                raise DeviceError(
                    f"{len(late)} of {ranks} ranks did not come to {address}:{port} in time, "
                    f"among them {few}; is WORLD_SIZE right, and do they run?"
                )
    for rank, count in wrong:
        _require_equal(0, ranks, rank, count)


def _hear(guest: socket.socket) -> tuple[int, int] | None:
    """The rank that asks, and how many it counts; None if this is no rank."""
    try:
        said = _read(guest, _GREETING_BYTES, monotonic() + _GREETING_SECONDS)
    except OSError:  # a reset, so that a rank that was not heard yet asks again
        with suppress(OSError):  # this one has gone
            guest.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return None
    if len(said) < _GREETING_BYTES or not said.startswith(_GREETING):
        return None
    return int.from_bytes(said[-8:-4]), int.from_bytes(said[-4:])


def _listening(address: str, port: int) -> socket.socket:
    try:
        return socket.create_server((address, port), backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            what = f"port {port} of {address} is taken; set MASTER_PORT to another one on all ranks"
        else:
            what = f"rank 0 cannot listen on {address}:{port} ({error}); MASTER_ADDR is its own"
        raise DeviceError(what) from error


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
