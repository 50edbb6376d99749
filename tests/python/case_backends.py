# SPDX-License-Identifier: Apache-2.0
"""Backends of epkit for registries of others, with the real registries."""
import os
import pathlib
import subprocess
import sys

import torch
import torch.distributed as dist
from ranks import raises, run

REQUIREMENTS = pathlib.Path(__file__).with_name("flashinfer.txt")


def flashinfer():
    """Makes flashinfer importable: $EPKIT_FLASHINFER, or in the long tier a folder that pip fills once (100 MB). No GPU is needed."""
    from run import Skip
    folder = os.environ.get("EPKIT_FLASHINFER")
    if folder is None:
        if not os.environ.get("EPKIT_TEST_LONG"):
            raise Skip("EPKIT_TEST_LONG=1 fetches flashinfer")
        folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "epkit-tests/flashinfer-0.7.4"
        if not (folder / "complete").exists():
            done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--upgrade",
                                   "--target", folder, "-r", REQUIREMENTS], capture_output=True, text=True, check=False)
            if done.returncode:
                raise Skip(f"pip cannot fetch flashinfer: {done.stderr[-200:]}")
            (folder / "complete").touch()
    sys.path.insert(0, str(folder))


def communication(rank, size):
    from flashinfer.moe_ep import BootstrapConfig, MoEEpCommParams, MoEEpCommunication, create_communication

    import epkit.compat.flashinfer as backend

    experts, topk, most, hidden = 4 * size, 3, 12, 64
    params = MoEEpCommParams(num_experts=experts, top_k=topk, max_tokens_per_rank=most, hidden_size=hidden, invalid_expert_id=-7)
    one = create_communication(BootstrapConfig(world_size=size, rank=rank, process_group=dist.group.WORLD), params, "epkit")
    assert isinstance(one, MoEEpCommunication) and type(one) is backend.EpkitCommunication and one.backend_name == "epkit"
    for seed, (dtype, width, scales) in enumerate(((torch.bfloat16, hidden, None), (torch.uint8, 33, torch.uint8), (torch.float16, 8, None),
                                                   (torch.bfloat16, hidden, torch.float32))):
        torch.manual_seed(10 * seed + rank)
        tokens = (12, 5, 0, 9)[(seed + rank) % 4]
        idx = torch.stack([torch.randperm(experts)[:topk] for _ in range(tokens)]) if tokens else torch.zeros(0, topk, dtype=torch.int64)
        idx[torch.rand(idx.shape) < 0.2] = -1
        x = torch.randint(-8, 9, (tokens, width)).to(dtype)
        weights = torch.rand(tokens, topk)
        scale = None if scales is None else torch.randint(0, 99, (tokens, 5)).to(scales)
        stats = torch.full((experts,), float(rank))
        given = {"hidden_states_scale": scale, "runtime_max_tokens_per_rank": None if seed else 12, "eplb_local_stats": stats}
        got = one.dispatch(x, idx.to(torch.int32) if seed % 2 else idx, weights, **given)
        raises(RuntimeError, "no combine", one.dispatch, x, idx, weights)
        every = [None] * size
        dist.all_gather_object(every, (x, idx, weights, scale))
        here = [(idx // 4 == rank).any(1) for _, idx, _, _ in every]
        n, rows = sum(int(mask.sum()) for mask in here), size * most
        assert got.tokens_per_rank == most and all(len(one) == rows for one in (got.hidden_states, got.topk_ids, got.topk_weights))
        assert torch.equal(got.hidden_states[:n], torch.cat([x[mask] for (x, *_), mask in zip(every, here)]))
        assert got.hidden_states.dtype == dtype and (got.topk_ids[n:] == -7).all()
        want = torch.cat([idx[mask] for (_, idx, _, _), mask in zip(every, here)])
        mine = want // 4 == rank
        assert torch.equal(got.topk_ids[:n].long(), torch.where(mine, want, -7))
        assert torch.equal(got.topk_weights[:n][mine], torch.cat([w[mask] for (_, _, w, _), mask in zip(every, here)])[mine])
        assert scale is None or torch.equal(got.hidden_states_scale[:n], torch.cat([s[mask] for (*_, s), mask in zip(every, here)]))
        assert torch.equal(got.eplb_gathered_stats[:, 0], torch.arange(size).float())
        # Each rank adds up the choices that it has; small integers are exact in any order.
        y = torch.zeros(rows, hidden, dtype=torch.bfloat16)
        y[:n] = mine.sum(1, keepdim=True).to(torch.bfloat16)
        out = torch.empty(tokens, hidden, dtype=torch.bfloat16) if seed == 2 else None
        total = one.combine(y.view(size, most, hidden) if seed % 2 else y, output=out)
        assert torch.equal(total, (idx >= 0).sum(1, keepdim=True).expand(-1, hidden).to(torch.bfloat16)) and (out is None or total is out)
        raises(RuntimeError, "no dispatch", one.combine, y)
    raises(ValueError, "13 tokens 12", one.dispatch, torch.zeros(13, hidden), torch.zeros(13, topk, dtype=torch.int64))
    one.destroy()
    one.destroy()
    raises(RuntimeError, "destroy()", one.dispatch, x, idx, weights)
    wrong = MoEEpCommParams(num_experts=experts, top_k=topk, max_tokens_per_rank=most, hidden_size=hidden, dtype=torch.float32)
    bootstrap = BootstrapConfig(world_size=size, rank=rank, process_group=dist.group.WORLD)
    raises(ValueError, "bfloat16", create_communication, bootstrap, wrong, "epkit")


def test_communication_of_flashinfer():
    flashinfer()
    for size in (2, 3):
        run(size, communication)
