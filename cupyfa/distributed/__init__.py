"""Context parallelism: attention over a sequence that is sharded among ranks, one per GPU."""

from cupyfa.distributed.communicator import Group
from cupyfa.distributed.in_threads import threads
from cupyfa.distributed.joining import group, unique_id
from cupyfa.distributed.shards import Sharded, rows, shard

__all__ = [
    "Group",
    "Sharded",
    "group",
    "rows",
    "shard",
    "threads",
    "unique_id",
]
