"""Connects the processes that a launcher has started to a group of ranks."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Literal, NamedTuple

from cupyfa.distributed.communicator import Group, require_seconds
from cupyfa.distributed.in_threads import groups_of_threads
from cupyfa.errors import DeviceError, described
from cupyfa.problem.problem import whole
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.choose_backend import backend_named

# Environment variables of each launcher: rank, number of ranks, rank on this host.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
_RANKS_ON_HOST = [names[2] for names in _LAUNCHERS]
_ID_BYTES = 128
_PAUSE = 0.05  # seconds between two reads of rank 0's file


class Place(NamedTuple):
    """A process's rank, the number of ranks, and the index of its GPU."""

    rank: int
    ranks: int
    device: int


def group(
    rank: int | None = None,
    ranks: int | None = None,
    unique_id: bytes | None = None,
    *,
    file: str | Path | None = None,
    device: int | None = None,
    timeout: float = 60,
    over: Literal["nccl", "mpi"] = "nccl",
) -> Group:
    """Joins this process to the group of all processes that a launcher has started.

    All processes must call this function. By default it reads rank and ranks from the environment:
    RANK, WORLD_SIZE and LOCAL_RANK as set by torchrun, or the variables of mpirun and srun. A
    process without a launcher becomes a group of one.

    rank, ranks: this process's rank, from 0, and the number of ranks.
    unique_id: the result of ``unique_id()`` on rank 0. By default ranks exchange it through
        ``file``, or by mpi4py if the program has imported it and MPI has started the ranks.
    file: a path that all ranks can read and that does not exist yet. Rank 0 writes its unique id
        there, and removes the file when the ranks are connected.
    device: the GPU to use, which becomes the current device; by default the rank on this host, and
        for a group of one the current device.
    timeout: how many seconds a rank waits for a message from another rank, including the time that
        the other rank needs to compute the message.
    over: "nccl" sends arrays in GPU memory, "mpi" sends NumPy arrays by mpi4py.

    Raises ImportError if NCCL or mpi4py is missing, ValueError for wrong arguments, and DeviceError
    if this rank has no GPU or the ranks do not connect within the time-out.
    """
    require_seconds(timeout)
    if over == "mpi":
        given = {
            "rank": rank,
            "ranks": ranks,
            "unique_id": unique_id,
            "file": file,
            "device": device,
        }
        for name, x in given.items():
            if x is not None:
                raise ValueError(
                    f"{name} is {described(x)}, but with over='mpi' the ranks come from MPI and no "
                    f"GPU is used; leave {name} out"
                )
        from cupyfa.distributed.mpi import MpiGroup

        return MpiGroup(_mpi().COMM_WORLD, timeout)
    if over != "nccl":
        raise ValueError(f"over is {described(over)}; use 'nccl' or 'mpi'")
    place = _place(rank, ranks, device, os.environ)
    if place.ranks == 1:
        if device is not None:
            _use_device(place)
        return groups_of_threads(1, timeout)[0]
    return _nccl_group(place, unique_id, None if file is None else Path(file), timeout)


def unique_id() -> bytes:
    """Creates the 128-byte NCCL id by which ranks find each other, for custom launchers.

    Rank 0 creates the id and sends it to all ranks, which call ``group(rank, ranks, unique_id)``.
    """
    from cupyfa.runtime.cuda import nccl

    return nccl.unique_id()


def _nccl_group(place: Place, name: bytes | None, file: Path | None, timeout: float) -> Group:
    cuda = _use_device(place)
    from cupyfa.distributed.nccl_group import NcclGroup
    from cupyfa.runtime.cuda import nccl

    nccl.library()  # a rank without NCCL raises here, before it connects to other ranks
    if name is None:
        name = _id_by_mpi(place, timeout) if file is None else _id_in_file(place, file, timeout)
    if not isinstance(name, bytes) or len(name) != _ID_BYTES:
        raise ValueError(f"unique_id is {described(name)}; pass the bytes that unique_id() returns")

    def make() -> nccl.Nccl:
        cuda.use(place.device)
        return nccl.Nccl(place.rank, place.ranks, name)

    try:
        engine = _within(timeout, make, f"connecting rank {place.rank} to all other ranks")
    finally:
        if file is not None and place.rank == 0:
            file.unlink(missing_ok=True)
    return NcclGroup(place.rank, place.ranks, timeout, engine)


def _use_device(place: Place) -> Backend:
    try:
        cuda = backend_named("cuda")
    except DeviceError as error:
        why = str(error).partition(";")[0]
        raise DeviceError(
            f"rank {place.rank} needs a GPU for NCCL ({why}); for NumPy arrays, use "
            "group(over='mpi'); to try a program in one process, use threads()"
        ) from error
    if place.device >= len(cuda.models):
        raise DeviceError(
            f"rank {place.rank} is assigned device {place.device}, but this host has only "
            f"{len(cuda.models)} devices; start at most one rank per GPU, or pass device="
        )
    cuda.use(place.device)
    return cuda


def _id_in_file(place: Place, file: Path, timeout: float) -> bytes:
    """Writes a new unique id to a file on rank 0; reads the id from that file on other ranks."""
    if place.rank == 0:
        made = unique_id()
        try:
            with file.open("xb") as new:
                new.write(made)
        except FileExistsError:
            raise ValueError(
                f"the file {file} exists, perhaps from a run that was killed; remove it, or use a "
                "new name for each run"
            ) from None
        return made
    deadline = monotonic() + timeout
    while monotonic() < deadline:
        found = file.read_bytes() if file.exists() else b""
        if len(found) == _ID_BYTES:
            return found
        sleep(_PAUSE)
    raise DeviceError(
        f"rank {place.rank} found no unique id in {file} within {timeout:g} s; check that rank 0 "
        "runs with the same file"
    )


def _id_by_mpi(place: Place, timeout: float) -> bytes:
    """Receives rank 0's unique id by MPI; raises ValueError if MPI has not started the ranks."""
    if "mpi4py.MPI" in sys.modules:
        world = _mpi().COMM_WORLD
        # If these differ, some library has imported mpi4py, but MPI has not started the processes.
        if (world.Get_rank(), world.Get_size()) == place[:2]:
            from cupyfa.distributed.mpi import MpiGroup

            with MpiGroup(world, timeout) as group:
                return group.agree(unique_id() if place.rank == 0 else bytes(_ID_BYTES))[0]
    raise ValueError(
        f"rank {place.rank} does not know the unique id of rank 0; pass file=, a path that all "
        "ranks can read, or unique_id=, or import mpi4py.MPI in a program started by mpirun"
    )


def _place(
    rank: int | None, ranks: int | None, device: int | None, environment: Mapping[str, str]
) -> Place:
    """Finds this process's rank in the arguments or in the launcher's environment variables."""
    if (rank is None) != (ranks is None):
        raise ValueError(f"rank is {rank} and ranks is {ranks}; pass both or neither")
    launcher = next((x for x in _LAUNCHERS if {*x[:2]} <= environment.keys()), None)
    if rank is None or ranks is None:
        if launcher is None:
            return Place(0, 1, 0)
        rank, ranks = (int(environment[x]) for x in launcher[:2])
    ranks = whole("ranks", ranks, 1)
    if not 0 <= whole("rank", rank, 0) < ranks:
        raise ValueError(f"rank is {rank} and ranks is {ranks}; pass a rank from 0 to {ranks - 1}")
    if device is None:
        # Try all launchers' variables: with PMI-2, srun sets SLURM_LOCALID next to PMI_RANK.
        names = (launcher[2], *_RANKS_ON_HOST) if launcher else ()
        device = int(next((environment[x] for x in names if x in environment), rank))
    return Place(rank, ranks, whole("device", device, 0))


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ImportError(
            f"group(over='mpi') needs mpi4py ({error}) and an MPI library: pip install mpi4py"
        ) from None
    return MPI


def _within(timeout: float, make: Callable[[], Any], what: str) -> Any:
    """Calls ``make`` in a thread; raises DeviceError on time-out, while the thread continues."""
    made: Future[Any] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return made.result(timeout)
    except TimeoutError:
        raise DeviceError(
            f"{what} took more than {timeout:g} s; check that all ranks are running"
        ) from None
    except Exception as error:
        raise DeviceError(f"{what} failed: {error}") from error
