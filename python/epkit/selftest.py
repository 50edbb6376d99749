# SPDX-License-Identifier: Apache-2.0
"""python -m epkit.selftest [RANKS | --who]: proves an installation: loads the library, starts ranks, compares results.

Runs on the GPUs that torch finds, otherwise on the CPU (as $EPKIT_BACKEND=host always does). Exit code 0: everything
that was received and added up was exact. 1: something was not, or a rank ended; the text says what and where.

--who starts nothing: it says which deep_ep and nixl_ep a program would import, and why.
"""
import os
import sys
import tempfile
from typing import TYPE_CHECKING, List

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from .compat import NAMES, who

if TYPE_CHECKING:
    from .communicator import Communicator


def _check(what: str, ok: bool) -> None:
    if not ok:
        raise AssertionError(f"{what}: the result is not what it must be")


def _work(comm: "Communicator") -> None:
    """Plans, both layouts, weights, low latency: on small integers, so that every sum is exact."""
    device, experts, topk, hidden = comm.device, comm.size * 4, 4, 256
    torch.manual_seed(comm.rank)
    tokens = 40 + comm.rank % 24  # up to the 64 of low latency below
    topk_idx = torch.rand(tokens, experts).topk(topk).indices.to(device)
    topk_idx[::7, 1] = -1
    weights = torch.rand(tokens, topk, device=device)
    x = torch.randint(-8, 8, (tokens, hidden), device=device).to(torch.bfloat16)
    ranks = comm.layout(topk_idx, experts)[2].sum(1, keepdim=True)
    choices = (topk_idx >= 0).sum(1, keepdim=True)
    for expanded, times in ((False, ranks), (True, choices)):
        plan = comm.plan(topk_idx, experts, expanded=expanded, alignment=8, zero_padding=True)
        rows = plan.dispatch(x, weights)
        out, back = plan.combine(rows.x, rows.topk_weights)
        assert back is not None
        _check(f"combine, expanded={expanded}", torch.equal(out.float(), x.float() * times))
        _check("weights", torch.equal(back, weights.masked_fill(topk_idx < 0, 0)))
    calls = comm.low_latency(64, hidden, experts, topk)
    got = calls.dispatch(x, topk_idx, hook=True)
    assert got.finish is not None
    got.finish()
    out, _ = calls.combine(got.x, topk_idx, torch.ones_like(weights), call=got.call)
    _check("low latency", torch.equal(out.float(), x.float() * choices))


def _rank(rank: int, ranks: int, store: str) -> None:
    import epkit

    # A file, not a port: nothing else on the machine can be in the way.
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=ranks)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    comm = epkit.Communicator(timeout=60)
    _work(comm)
    if comm.is_cuda:
        torch.cuda.synchronize()
    comm.barrier()
    comm.synchronize()
    backend = comm.backend
    comm.free()
    dist.destroy_process_group()
    if rank == 0:
        cuda = f" of CUDA {epkit.cuda_version}" if comm.is_cuda else ""
        print(f"epkit {epkit.__version__}: {ranks} ranks, backend {backend}{cuda}, torch {torch.__version__}: all results are exact")


def main(argv: List[str]) -> int:
    """Starts the ranks; the number of GPUs, or 2."""
    if argv in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if argv == ["--who"]:
        print(*map(who, NAMES), sep="\n")
        return 0
    if len(argv) > 1 or (argv and not (argv[0].isdecimal() and int(argv[0]))):
        print(f"epkit.selftest: the arguments are {' '.join(argv)!r}, must be one number of ranks, 1 or more, or none (--help)",
              file=sys.stderr)
        return 2
    host = os.environ.get("EPKIT_BACKEND") == "host" or not torch.cuda.is_available()
    ranks = int(argv[0]) if argv else 2 if host else max(2, torch.cuda.device_count())
    with tempfile.TemporaryDirectory(prefix="epkit-selftest-") as folder:
        try:
            spawn(_rank, args=(ranks, os.path.join(folder, "store")), nprocs=ranks)  # type: ignore[no-untyped-call]
        except ProcessRaisedException as error:
            print(f"epkit.selftest: a rank failed:\n{error}", file=sys.stderr)
            return 1
        except ProcessExitedException as error:
            print(f"epkit.selftest: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
