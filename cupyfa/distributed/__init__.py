"""Attention of a sequence whose rows are divided among ranks, one for each GPU."""

from cupyfa.distributed.calls import attention, attention_backward, attention_vjp
from cupyfa.distributed.group import Group
from cupyfa.distributed.shards import rows, shard
from cupyfa.distributed.threads import threads

__all__ = [
    "Group",
    "attention",
    "attention_backward",
    "attention_vjp",
    "rows",
    "shard",
    "threads",
]
