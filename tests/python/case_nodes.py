# SPDX-License-Identifier: Apache-2.0
"""Groups of several nodes: the ranks of one machine, divided, over the networks between nodes."""
import os
import random
import signal
from contextlib import contextmanager, suppress

import case_engines
import case_hybrid
import case_intranode
import case_lowlatency
import case_random
import deep_ep
import epkit
import ranks
import torch
import torch.distributed as dist
from ranks import on_ranks, raises, run

EXPERTS, TOPK, HIDDEN = 12, 4, 256


@contextmanager
def divided(network):
    """Groups of an even number of ranks that start within it have two nodes."""
    before = os.environ.get("EPKIT_NETWORK"), ranks.NODES
    os.environ["EPKIT_NETWORK"], ranks.NODES = network, 2
    try:
        yield
    finally:
        os.environ.pop("EPKIT_NETWORK")
        if before[0] is not None:
            os.environ["EPKIT_NETWORK"] = before[0]
        ranks.NODES = before[1]


def layer(rank, size, network):
    buffer = deep_ep.Buffer(dist.group.WORLD)
    info = buffer._comm.info()
    assert (info["nnodes"], info["node"], info["network"]) == (2, rank // (size // 2), network)
    assert (buffer._comm.nodes, buffer._comm.node) == (2, info["node"])
    assert buffer.runtime.get_num_rdma_ranks() == 2 and buffer.runtime.get_rdma_rank() == info["node"]
    assert buffer.runtime.get_root_rdma_rank(True) == rank % (size // 2) and buffer.runtime.get_root_rdma_rank(False) == 0
    for seed in range(3):
        torch.manual_seed(100 * seed + rank)
        tokens = (0, 50, 37, 64)[(rank + seed) % 4]
        idx = torch.rand(tokens, EXPERTS).topk(TOPK).indices
        idx[torch.rand(idx.shape) < 0.2] = -1
        x, weights = torch.randint(-4, 5, (tokens, HIDDEN)).to(torch.bfloat16), torch.rand(tokens, TOPK)
        per_rank, per_host, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
        expected = torch.stack([in_rank[:, node * size // 2:(node + 1) * size // 2].any(1).sum() for node in range(2)])
        assert per_host.dtype == torch.int32 and torch.equal(per_host, expected.to(torch.int32))
        arguments = dict(num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_host, is_token_in_rank=in_rank,
                         num_tokens_per_expert=per_expert)
        rows, local, got, counts, handle, _ = buffer.internode_dispatch(x, topk_idx=idx, topk_weights=weights, **arguments)
        owned = [(local == expert).sum().item() for expert in range(EXPERTS // size)]
        assert owned == counts
        for one in (handle, tuple(handle), tuple(tensor.detach() for tensor in handle)):
            assert torch.equal(rows, buffer.dispatch(x, handle=one)[0])
        raises(TypeError, "handle copies", buffer.dispatch, x, handle=tuple(tensor.clone() for tensor in handle))
        summed, back, _ = buffer.internode_combine(rows, handle, got)
        # Small integers: exact in any order. Each rank returns the row once, and the weights of its choices.
        assert torch.equal(summed, (x.float() * in_rank.sum(1, keepdim=True)).to(torch.bfloat16))
        assert torch.equal(back, torch.where(idx >= 0, weights, 0.0))


def table_of(token, columns):
    """What a token's rows are before the combine: bfloat16 [columns, H]; the same on all ranks."""
    dice = torch.Generator(torch.get_default_device()).manual_seed(token)
    return torch.randn(columns, HIDDEN, generator=dice).to(torch.bfloat16)


def rounded_sum(terms):
    """0 plus the terms, one by one, in float32, rounded to bfloat16; terms: by position."""
    total = torch.zeros(HIDDEN)
    for position in sorted(terms):
        total = total + terms[position].float()
    return total.to(torch.bfloat16)


def sum_of_hybrid(choices, table, expand, size, bias):
    """DeepEP's: the rows of a rank, then those of a scale-up domain, then all, by the order of the choices. Each term stands at the
    last choice that it has."""
    local, domains_ = EXPERTS // size, {}
    for rank in sorted({expert // local for expert in choices if expert >= 0}):
        mine = {k: table[k] for k, expert in enumerate(choices) if expert >= 0 and expert // local == rank}
        domains_.setdefault(rank // (size // 2), {})[max(mine)] = rounded_sum(mine) if expand else table[rank]
    total = torch.zeros(HIDDEN) if bias is None else bias.float()
    for position in sorted(max(terms) for terms in domains_.values()):
        total = total + rounded_sum(next(terms for terms in domains_.values() if max(terms) == position)).float()
    return total.to(torch.bfloat16)


def bits_of_combine(rank, size):
    most = 24
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=most, hidden=HIDDEN, num_topk=TOPK)
    differ = 0
    for seed in range(4):
        torch.manual_seed(10 * seed + rank)
        tokens, expand = (most, 0, 7, 19)[(seed + rank) % 4], seed % 2 == 1
        idx = torch.randint(-1, EXPERTS, (tokens, TOPK))  # some of them twice
        x, bias = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16), torch.randn(tokens, HIDDEN).to(torch.bfloat16)
        rows, _, _, handle, _ = buffer.dispatch(x, topk_idx=idx, num_experts=EXPERTS, do_expand=expand, expert_alignment=4)
        metadata, columns = handle.recv_src_metadata, TOPK if expand else size
        for i, token in enumerate(metadata[:, 0].tolist()):
            table = table_of(token, columns)
            if not expand:
                rows[i] = table[rank]
            for k, row in enumerate(metadata[i, 2:].tolist() if expand else ()):
                if row >= 0:
                    rows[row] = table[k]
        for given in (None, bias):
            out = buffer.combine(rows, handle, bias=given)[0]
            wants = [sum_of_hybrid(choices, table_of(rank * most + t, columns), expand, size, None if given is None else given[t])
                     for t, choices in enumerate(idx.tolist())]
            assert not wants or torch.equal(out, torch.stack(wants)), (seed, expand)
        plain = handle._plan(None).combine(rows, None, bias)[0]  # float32 sums of the nodes, in rank order
        differ += int((plain != out).sum())
    assert differ  # the definitions are not the same: this compares something


def test_combine_has_the_bits_of_hybrid_deepep():
    for network in ("tcp", "emulated"):
        with divided(network):
            run(4, bits_of_combine)


def domains(rank, size, hybrid):
    one = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=8, hidden=HIDDEN, num_topk=TOPK, allow_hybrid_mode=hybrid)
    logical = (2, size // 2) if hybrid else (1, size)  # as DeepEP
    assert (one.get_physical_domain_size(), one.get_logical_domain_size()) == ((2, size // 2), logical)
    assert (one.num_scaleout_ranks, one.num_scaleup_ranks, one.num_rdma_ranks, one.num_nvlink_ranks) == (*logical, 2, size // 2)
    assert (one.scaleout_rank_idx, one.scaleup_rank_idx) == (rank // logical[1], rank % logical[1])
    torch.manual_seed(rank)
    idx = torch.rand(8, EXPERTS).topk(TOPK).indices
    x, weights = torch.randint(-4, 5, (8, HIDDEN)).to(torch.bfloat16), torch.rand(8, TOPK)
    for expand in (False, True):
        rows, _, got, handle, _ = one.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=EXPERTS, do_expand=expand)
        # As DeepEP: the tokens of ranks with the same index in their domain are counted together.
        sources = handle.recv_src_metadata[:, 0] // 8 % logical[1]
        sums = [int((sources <= index).sum()) for index in range(logical[1])]
        assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == sums
        assert handle.psum_num_recv_tokens_per_scaleup_rank.dtype == torch.int32
        summed, back, _ = one.combine(rows, handle, got)
        times = TOPK if expand else torch.stack([(idx * size // EXPERTS == to).any(1) for to in range(size)], 1).sum(1, True)
        assert torch.equal(summed, (x.float() * times).to(torch.bfloat16)) and torch.equal(back, weights)


@on_ranks(4)
def test_sizes_of_domains(rank, size):
    """Before there is a buffer: by the variables of torchrun, if they fit the group."""
    group = dist.group.WORLD
    for text, expected in (("2", (2, 2)), ("4", (1, 4)), ("3", (1, 4)), ("0", (1, 4)), ("x", (1, 4)), ("", (1, 4))):
        os.environ["LOCAL_WORLD_SIZE"] = text
        assert deep_ep.get_physical_domain_size(group) == deep_ep.get_logical_domain_size(group) == expected
        assert deep_ep.get_logical_domain_size(group, allow_hybrid_mode=False) == (1, 4)
    del os.environ["LOCAL_WORLD_SIZE"]
    assert deep_ep.get_physical_domain_size(group) == (1, 4)
    dist.barrier()  # gloo connects all before the first of them ends


def new_rows(buffer, x, idx, weights, experts, **more):
    layout = buffer.get_dispatch_layout(idx, experts)
    return buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_tokens_per_rank=layout[0], num_tokens_per_rdma_rank=layout[1],
                           is_token_in_rank=layout[3], num_tokens_per_expert=layout[2], **more)


def capacities(rank, size):
    """Fixed capacities that differ between ranks, and one that is too small, which all ranks learn."""
    buffer = deep_ep.Buffer(dist.group.WORLD)
    torch.manual_seed(rank)
    idx, weights, x = torch.rand(20, EXPERTS).topk(TOPK).indices, torch.rand(20, TOPK), torch.ones(20, HIDDEN, dtype=torch.bfloat16)
    rows, local, _, _, handle, _ = new_rows(buffer, x, idx, weights, EXPERTS, num_worst_tokens=80 + 10 * rank)
    n = int((local >= 0).any(1).sum())
    assert rows.shape[0] == 80 + 10 * rank and (local[n:] == -1).all()
    times = buffer.get_dispatch_layout(idx, EXPERTS)[3].sum(1, keepdim=True)
    assert torch.equal(buffer.combine(rows, handle)[0], x * times)
    assert torch.equal(buffer.dispatch(x, handle=tuple(one.detach() for one in handle))[0][:n], rows[:n])
    small = {"num_worst_tokens": 5 if rank == 1 else 80}
    if ranks.CUDA:  # there it may be found after the call has returned, and is then reported by the next one
        with suppress(epkit.ArgumentError):
            new_rows(buffer, x, idx, weights, EXPERTS, **small)
        torch.cuda.synchronize()
    raises(epkit.ArgumentError, "rank 1 5 num_worst_tokens Buffer.dispatch()", new_rows, buffer, x, idx, weights, EXPERTS, **small)
    assert torch.equal(new_rows(buffer, x, idx, weights, EXPERTS, num_worst_tokens=80)[0][:n], rows[:n])


def dies(rank, size, kind, victim):
    """A rank is killed in the middle of a layer: all others name it, and form a group without it."""
    which = deep_ep.ElasticBuffer if kind == "elastic" else deep_ep.Buffer
    buffer = which(dist.group.WORLD, explicitly_destroy=True)
    torch.manual_seed(rank)
    idx, weights, x = torch.rand(20, EXPERTS).topk(TOPK).indices, torch.rand(20, TOPK), torch.ones(20, HIDDEN, dtype=torch.bfloat16)

    def layer_until(step):
        for number in range(1000):
            die = os.kill if (rank, number) == (victim, step) else lambda *_: None
            if kind == "elastic":
                rows, _, _, handle, _ = buffer.dispatch(x, idx, weights, num_experts=EXPERTS, num_max_tokens_per_rank=32)
                die(os.getpid(), signal.SIGKILL)
                buffer.combine(rows, handle)
            elif kind == "low latency":
                rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, 32, EXPERTS, use_fp8=False)
                die(os.getpid(), signal.SIGKILL)
                buffer.low_latency_combine(rows, idx, weights, handle)
            else:
                rows, _, _, _, handle, _ = new_rows(buffer, x, idx, weights, EXPERTS)
                die(os.getpid(), signal.SIGKILL)
                buffer.combine(rows, handle)

    raises(epkit.PeerError, f"rank {victim}", layer_until, 3)
    assert victim in buffer._comm.failed_ranks()  # others that go on may have left already
    buffer.destroy()
    new = epkit.Communicator(dist.new_group([r for r in range(size) if r != victim], use_local_synchronization=True))
    assert (new.size, new.rank) == (size - 1, rank - (rank > victim))
    plan = new.plan(torch.arange(20).view(20, 1) % new.size, new.size)
    assert torch.equal(plan.combine(plan.dispatch(x).x)[0], x)
    new.barrier()


def destroyed(rank, size):
    """Buffers of the group and of parts of it, with answers of earlier dispatches, and then destroyed in another order on each rank."""
    across = [dist.new_group(list(range(first, size, 2))) for first in range(2)]
    buffers = [deep_ep.Buffer(group, explicitly_destroy=True) for group in (dist.group.WORLD, across[rank % 2], dist.group.WORLD)]
    x, weights, kept, draw = torch.ones(20, HIDDEN, dtype=torch.bfloat16), torch.rand(20, TOPK), [], random.Random(3)
    for _ in range(10):
        for buffer in buffers:
            idx = torch.rand(20, EXPERTS).topk(TOPK).indices
            rows, _, _, _, handle, _ = new_rows(buffer, x, idx, weights, EXPERTS)
            kept.append((buffer, rows, handle, buffer.get_dispatch_layout(idx, EXPERTS)[3].sum(1, keepdim=True)))
        draw.shuffle(kept)
        for buffer, rows, handle, times in kept[:8]:
            assert torch.equal(buffer.combine(rows, handle)[0], x * times)
            assert torch.equal(buffer.dispatch(x, handle=handle)[0], rows)
        del kept[15:]
    random.Random(rank).shuffle(buffers)
    for buffer in buffers:
        buffer.destroy()


@on_ranks(4)
def test_networks_that_are_none(rank, size):
    raises(epkit.ArgumentError, "ranks_per_node 3 divide", epkit.Communicator, ranks_per_node=3)
    raises(epkit.UnsupportedError, "rdma emulated tcp verbs", epkit.Communicator, ranks_per_node=2, network="rdma")
    raises(TypeError, "network int", epkit.Communicator, network=3)
    raises(TypeError, "ranks_per_node", epkit.Communicator, ranks_per_node="two")
    os.environ["EPKIT_NETWORK"] = "rdma"
    raises(epkit.UnsupportedError, "$EPKIT_NETWORK rdma", epkit.Communicator, ranks_per_node=2)
    os.environ["EPKIT_NETWORK"] = "emulated"
    comm = epkit.Communicator(ranks_per_node=2, network="tcp")
    assert comm.info()["network"] == "tcp" and comm.nodes == size // 2 and comm.node == rank // 2
    comm.free()


@on_ranks(4)
def test_nodes_by_the_environment(rank, size):
    """Variables divide the ranks of the program, of which a group has a part; without them the hosts do."""
    group = dist.new_group([1, 2, 3])
    alternate = dist.new_group([0, 2])
    for variables, expected in (({"EPKIT_RANKS_PER_NODE": "2"}, 2), ({"EPKIT_RANKS_PER_NODE": "1"}, 4),
                                ({"EPKIT_RANKS_PER_NODE": "3"}, 1), ({"LOCAL_WORLD_SIZE": "2"}, 1),
                                ({"LOCAL_WORLD_SIZE": "2", "EPKIT_NETWORK": "tcp"}, 2),
                                ({"LOCAL_WORLD_SIZE": "4", "EPKIT_NETWORK": "tcp", "EPKIT_RANKS_PER_NODE": "1"}, 4)):
        os.environ.update(variables)
        comm = epkit.Communicator()
        assert (comm.nodes, comm.node) == (expected, rank * expected // 4), (variables, comm)
        if rank and variables == {"EPKIT_RANKS_PER_NODE": "2"}:
            assert epkit.Communicator(group).nodes == 1  # 1 and 2 ranks: not divided
        if not rank % 2 and variables == {"EPKIT_RANKS_PER_NODE": "2"}:
            assert epkit.Communicator(alternate).nodes == 2
        comm.free()
        for name in variables:
            del os.environ[name]
    os.environ["EPKIT_RANKS_PER_NODE"] = "two"
    raises(ValueError, "Communicator: $EPKIT_RANKS_PER_NODE 'two'", epkit.Communicator)
    dist.barrier()


def test_layers_of_two_nodes():
    for network in ("emulated", "tcp"):
        with divided(network):
            run(4, layer, network)
    with divided("tcp"):
        run(2, layer, "tcp")


def test_elastic_buffers_of_two_nodes():
    for network in ("emulated", "tcp"):
        with divided(network):
            run(4, domains, True)
            run(4, domains, False)


def test_24_combinations_on_two_nodes():
    with divided("tcp"):
        case_intranode.test_24_combinations_2_ranks()


def test_low_latency_on_two_nodes():
    with divided("tcp"):
        case_lowlatency.test_all_variants_4_ranks()
        case_lowlatency.test_a_rank_that_ends_is_masked()


def test_engines_on_two_nodes():
    with divided("tcp"):
        for engine in (case_engines.test_vllm_high_throughput, case_engines.test_vllm_low_latency, case_engines.test_vllm_elastic,
                       case_engines.test_sglang, case_engines.test_sglang_elastic, case_engines.test_megatron):
            engine()


def test_hybrid_ep_on_two_nodes():
    with divided("tcp"):
        run(4, case_hybrid.every_mode)


def test_random_calls_on_two_nodes():
    for network, size in (("tcp", 4), ("emulated", 6)):
        with divided(network):
            run(size, case_random.buffers, 8)
            run(size, case_random.elastics, 8)
            run(size, case_random.low_latencies, 4)


def test_capacities_on_two_nodes():
    with divided("tcp"):
        run(4, capacities)


def test_a_rank_dies_on_two_nodes():
    for kind, victim, network in (("normal", 0, "tcp"), ("elastic", 3, "emulated"), ("low latency", 2, "tcp")):
        with divided(network):
            run(4, dies, kind, victim, expect=[-signal.SIGKILL if rank == victim else 0 for rank in range(4)])


def test_buffers_are_destroyed_in_any_order():
    with divided("tcp"):
        run(4, destroyed)
