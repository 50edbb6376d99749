# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of the ranks that change the members of a Buffer."""
import datetime
import uuid
from typing import Any, Sequence

import epkit


def _late(store: Any, here: Sequence[str], members: Sequence[int], seconds: float) -> epkit.PeerError:
    # One whose deadline was before this one has taken its token away, and has said so.
    late = [str(rank) for rank, name in zip(members, here) if not store.check([name]) and not store.check([name + "/gave-up"])]
    who = f"rank {', '.join(late)} did not come" if late else f"rank {members[0]} came and did not begin it"
    error = epkit.PeerError(f"nixl_ep: the connected ranks shall be {list(members)}, but {who} within {seconds:g} s: each of them calls "
                            "connect_ranks() or disconnect_ranks() for it, with one store")
    error.status, error.name = 301, "EP_E_TIMEOUT"
    return error


def rendezvous(store: Any, members: Sequence[int], rank: int, seconds: float) -> epkit.Members:
    """Waits until all members (sorted) are here. Returns them with a key that no other rendezvous has.

    Each rank that comes leaves a token of its own. When all are there, the first member takes them away, and answers each token
    with the key, which counts the rendezvous of these members. So whoever gives up and comes again brings another token, and
    nothing that an earlier rendezvous has left can be taken for this one.
    """
    name, token = "nixl_ep/" + ",".join(map(str, members)), uuid.uuid4().hex
    here = [f"{name}/here/{member}" for member in members]
    own, answer = here[members.index(rank)], f"{name}/go/{token}"
    first = rank == members[0]
    store.delete_key(own + "/gave-up")
    store.set(own, token)
    try:
        store.wait(here if first else [answer], datetime.timedelta(seconds=seconds))
    except Exception as error:  # noqa: BLE001 - stores raise errors of different types at the deadline
        late = _late(store, here, members, seconds)
        store.set(own + "/gave-up", token)
        store.delete_key(own)
        raise late from error
    if first:
        tokens = [store.get(one).decode() for one in here]
        for one in here:
            store.delete_key(one)
        key = f"{name}/{store.add(name, 1)}"
        for one in tokens:
            store.set(f"{name}/go/{one}", key)
    key = store.get(answer).decode()
    store.delete_key(answer)
    return epkit.Members(store, members, rank, key)
