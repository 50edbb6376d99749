# SPDX-License-Identifier: Apache-2.0
"""Members: the ranks that are present in a communicator, and their rendezvous in a store."""
import datetime
from typing import Any, Sequence

from ._native import ArgumentError
from ._tensors import want_integer


def want_store(store: Any, call: str, name: str) -> None:
    """Refuses what is no store of torch, by what it has: engines bring stores of their own."""
    if not hasattr(store, "wait") or not hasattr(store, "set"):
        raise TypeError(f"{call}: {name} is a {type(store).__name__}, must be a torch.distributed.Store")


class Members:
    """For Communicator(group=...) and Communicator.regroup(): some of the ranks, with a store for their rendezvous.

    Arguments:
        store: a torch.distributed.Store that all members reach, such as a TCPStore; its host should outlive any of them.
        ranks: the numbers of all members, the same on each of them: their slots in the communicator.
        rank: the number of this one.
        key: a name of this rendezvous, the same on all members and used once, such as "members-7" for the seventh change.

    It cannot see that a member dies while others wait for it: they wait until the deadline of the communicator, which has to be longer
    than a new process needs to come here. Two small keys for each rank stay in the store.
    """

    def __init__(self, store: Any, ranks: Sequence[int], rank: int, key: str) -> None:
        want_store(store, "Members", "store")
        if not isinstance(key, str) or not hasattr(ranks, "__iter__"):
            raise TypeError(f"Members: key is {key!r}, must be a text; ranks is {ranks!r}, must be numbers of ranks")
        self.store = store
        self.ranks = sorted(want_integer(other, "Members", "ranks") for other in ranks)
        self.rank = want_integer(rank, "Members", "rank")
        self.key = key
        self._round = 0
        self._used = False
        if len(set(self.ranks)) != len(self.ranks) or (self.ranks and self.ranks[0] < 0):
            raise ValueError(f"Members: ranks are {self.ranks}, must be numbers of ranks, each once")
        if self.rank not in self.ranks:
            raise ValueError(f"Members: rank {self.rank} is not one of the members {self.ranks}")

    def _rendezvous(self) -> "Members":
        """Itself, for one rendezvous."""
        mine = f"{self.key}/{self.rank}"
        if self._used or self.store.add(mine, 1) != 1:
            raise ValueError(f"Members: {self.key!r} has been used by rank {self.rank} before: each rendezvous needs a name of its own")
        self._used = True
        return self

    def _want_slot(self, rank: int, slots: int) -> None:
        """Refuses members of another communicator than one of so many slots in which this rank has that number."""
        if self.rank != rank or self.ranks[-1] >= slots:
            raise ArgumentError(f"Communicator.regroup: this is rank {rank} of {slots}, and Members has rank {self.rank} of the members "
                                f"{self.ranks}: they are numbers of ranks in this communicator")

    def _gather(self, data: bytes, timeout_ms: int) -> bytes:
        """An all-gather of bytes of the members, in the order of their numbers."""
        self._round += 1
        names = [f"{self.key}/{self._round}/{rank}" for rank in self.ranks]
        self.store.set(names[self.ranks.index(self.rank)], data)
        try:
            self.store.wait(names, datetime.timedelta(milliseconds=timeout_ms))
        except Exception as error:  # noqa: BLE001 - stores raise errors of different types at the deadline
            late = [rank for rank, name in zip(self.ranks, names) if not self._has(name)]
            if not late:
                raise
            raise TimeoutError(f"rank {', '.join(map(str, late))} of the members {self.ranks} did not come to {self.key!r} within "
                               f"{timeout_ms} ms") from error
        every = b"".join(self.store.get(name) for name in names)
        if self._round > 1:  # all have read what came before, because they are here
            try:
                self.store.delete_key(f"{self.key}/{self._round - 1}/{self.rank}")
            except Exception:  # noqa: BLE001 - some stores cannot
                pass
        return every

    def _has(self, name: str) -> bool:
        try:
            return bool(self.store.check([name]))
        except Exception:  # noqa: BLE001 - the store itself is gone
            return True
