# SPDX-License-Identifier: Apache-2.0
"""How test programs begin: processes, seeds, printing; and what is known of the machine."""
import os
import random
from typing import Any, Dict, List, Tuple

import torch
import torch.distributed as dist

from epkit.communicator import nodes_of

_seeds = {"local": 0, "global": 0}
_local_rank = 0


class EnvOverride:
    """Environment variables for a `with`: a list of (name, value, whether)."""

    def __init__(self, envs: List[Tuple[str, str, bool]]) -> None:
        self.envs = {name: value for name, value, enable in envs if enable}

    def __enter__(self) -> "EnvOverride":
        self._before = {name: os.environ.get(name) for name in self.envs}
        os.environ.update(self.envs)
        return self

    def __exit__(self, *_: Any) -> None:
        for name, value in self._before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def init_seed(global_seed: int) -> None:
    """Seeds torch and random with global_seed + rank."""
    _seeds["global"], _seeds["local"] = global_seed, global_seed + dist.get_rank()
    torch.manual_seed(_seeds["local"])
    random.seed(_seeds["local"])


def get_local_seed() -> int:
    return _seeds["local"]


def get_global_seed() -> int:
    return _seeds["global"]


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> Tuple[int, int, dist.ProcessGroup]:
    """Process group of a spawned test process: nccl with a CUDA device for each, gloo where there is none.

    MASTER_ADDR, MASTER_PORT, WORLD_SIZE (nodes) and RANK (of the node) as usual. Sets bfloat16 as the default type, the
    device as the default one, and $LOCAL_WORLD_SIZE. Returns (rank, number of ranks, group of all).
    """
    global _local_rank
    _local_rank = local_rank
    os.environ["LOCAL_WORLD_SIZE"] = str(num_local_ranks)
    cuda = torch.cuda.is_available()
    nodes, node = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    address = f"tcp://{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', '8361')}"
    options: Dict[str, Any] = {"device_id": torch.device("cuda", local_rank)} if cuda else {}
    if cuda:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if cuda else "gloo", init_method=address, world_size=nodes * num_local_ranks,
                            rank=node * num_local_ranks + local_rank, **options)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda" if cuda else "cpu")
    init_seed(seed)
    return dist.get_rank(), dist.get_world_size(), dist.new_group(list(range(dist.get_world_size())))


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Prints on every rank, or on the first one of each node; then a barrier."""
    if _local_rank == 0 or not once_in_node:
        print(s, flush=True)
    dist.barrier()


def get_physical_domain_size(group: dist.ProcessGroup) -> Tuple[int, int]:
    """(hosts, ranks of each), as $EPKIT_RANKS_PER_NODE or $LOCAL_WORLD_SIZE says; otherwise all ranks count as one host.

    The method of this name of an ElasticBuffer has asked the hosts.
    """
    local = os.environ.get("EPKIT_RANKS_PER_NODE") or os.environ.get("LOCAL_WORLD_SIZE", "")
    each = nodes_of(group, group.size(), int(local)) if local.isdecimal() and int(local) else 0
    return (group.size() // each, each) if each else (1, group.size())


def get_logical_domain_size(group: dist.ProcessGroup, allow_hybrid_mode: bool = True) -> Tuple[int, int]:
    """(scale-out ranks, scale-up ranks): as get_physical_domain_size(); (1, R) without allow_hybrid_mode."""
    return get_physical_domain_size(group) if allow_hybrid_mode else (1, group.size())


def check_nvlink_connections(group: Any) -> None:
    """Does nothing: the creation of the communicator checks whether ranks can reach each other's memory, and reports what is
    missing."""


def check_torch_deterministic() -> None:
    """torch.empty() must not fill memory in the background: the fill would run beside the communication stream."""
    if torch.are_deterministic_algorithms_enabled() and getattr(torch.utils.deterministic, "fill_uninitialized_memory") and \
            torch.cuda.is_available():
        raise AssertionError("set torch.utils.deterministic.fill_uninitialized_memory = False: with it torch.empty() writes "
                             "to outputs while they are received")


def get_sm_read_gbs() -> float:
    """GB/s that one multiprocessor reads: about a 130th of an H100's memory bandwidth, with room for bursts."""
    return 180


def get_sm_write_gbs() -> float:
    """GB/s that one multiprocessor writes to a peer over NVLink."""
    return 45


def get_nvlink_gbs(factor: float = 0.9) -> float:
    """GB/s of all NVLinks of the device in one direction: 450 on H100 and H200; 0 without a device."""
    return 450 * factor if torch.cuda.is_available() else 0


def check_fast_rdma_atomic_support(nic_name: str = "mlx5_0") -> bool:
    """False: epkit needs no atomics of a NIC."""
    return False


def get_rdma_gbs(nic_name: str = "mlx5_0") -> float:
    """0: not known. epkit chooses nothing by it."""
    return 0
