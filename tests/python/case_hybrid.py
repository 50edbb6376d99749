# SPDX-License-Identifier: Apache-2.0
"""HybridEPBuffer against an all-gather of everything, as its callers call it."""
import warnings

import deep_ep
import epkit
import ranks
import torch
import torch.distributed as dist
from deep_ep.hybrid_ep_buffer import indices_to_map
from ranks import on_ranks, raises, run

HIDDEN, LOCAL, TOPK = 256, 4, 3


def new_buffer(tokens=64, **options):
    return deep_ep.HybridEPBuffer(group=dist.group.WORLD, hidden_dim=HIDDEN, max_num_of_tokens_per_rank=tokens,
                                  num_local_experts=LOCAL, **options)


def gathered(tensor, counts):
    """The tensors of all ranks, one behind the other."""
    parts = [tensor.new_empty((count, *tensor.shape[1:])).cpu() for count in counts]
    padded = [torch.zeros((max(counts), *tensor.shape[1:]), dtype=tensor.dtype).view(torch.uint8) for _ in counts]
    mine = torch.zeros((max(counts), *tensor.shape[1:]), dtype=tensor.dtype)
    mine[:len(tensor)] = tensor.cpu()
    dist.all_gather(padded, mine.view(torch.uint8))
    for part, whole in zip(parts, padded):
        part.copy_(whole.view(tensor.dtype)[:len(part)])
    return torch.cat(parts).to(tensor.device)


def make(rank, size, tokens, fp8, seed=0, topk=TOPK):
    torch.manual_seed(100 * seed + rank)
    experts = LOCAL * size
    idx = torch.rand(tokens, experts).topk(topk, 1).indices
    idx[torch.rand(tokens, topk) < 0.2] = -1
    weights = torch.rand(tokens, topk)
    if fp8:
        x, scales = torch.randint(0, 256, (tokens, HIDDEN), dtype=torch.uint8), torch.randn(tokens, HIDDEN // 128)
    else:
        x, scales = torch.randn(tokens, HIDDEN).to(torch.bfloat16), None
    routing, probs = indices_to_map(idx, weights, tokens, experts)
    for token in range(min(tokens, 5)):
        chosen = {int(one) for one in idx[token] if one >= 0}
        assert set(routing[token].nonzero().flatten().tolist()) == chosen
        assert all(probs[token, one] == weights[token, k] for k, one in enumerate(idx[token].tolist()) if one >= 0)
    return x, scales, idx, weights, routing, probs


def reference(rank, size, x, scales, routing, probs, pad):
    """Rows of this rank's experts, padded, in order; and those of the layout without permutation."""
    counts = [0] * size
    dist.all_gather_object(counts, len(x))
    rows, map_, values = gathered(x, counts), gathered(routing, counts), gathered(probs, counts)
    sizes = None if scales is None else gathered(scales, counts)
    mine = map_[:, rank * LOCAL:(rank + 1) * LOCAL]
    parts, part_probs, part_scales, padded = [], [], [], []
    for expert in range(LOCAL):
        chosen = mine[:, expert].nonzero().flatten()
        spare = -len(chosen) % pad
        parts += [rows[chosen], rows.new_zeros((spare, HIDDEN))]
        part_probs += [values[chosen, rank * LOCAL + expert], values.new_zeros(spare)]
        if sizes is not None:
            part_scales += [sizes[chosen], sizes.new_zeros((spare, sizes.shape[1]))]
        padded.append(len(chosen) + spare)
    here = mine.any(1)
    return (torch.cat(parts), torch.cat(part_probs), torch.cat(part_scales) if part_scales else None, torch.tensor(padded),
            rows[here], mine[here], values[here], None if sizes is None else sizes[here])


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def equal(name, got, want, rows=None):
    if want is None:
        assert got is None, name
        return
    got = got if rows is None else got[:rows]
    assert got.dtype == want.dtype and got.shape == want.shape, f"{name}: {got.shape} of {got.dtype}, want {want.shape} of {want.dtype}"
    wrong = (bits(got) != bits(want.to(got.device))).flatten()
    assert not wrong.any(), f"{name}: {int(wrong.sum())} bytes of {len(wrong)}, from {int(wrong.nonzero()[0])} on: {got.flatten()[:4]} {want.flatten()[:4]}"


def back(x, routing, times=None):
    """What comes back for rows that the experts leave as they are: each token as often as it was sent."""
    times = routing.sum(1, keepdim=True) if times is None else times
    return (x.float() * times + 0.0).to(torch.bfloat16)  # a sum of nothing is 0, not -0


def permuted(rank, size, fp8, by_map, with_probs, pad, non_blocking):
    buffer = new_buffer()
    tokens = 23 + 11 * rank
    x, scales, idx, weights, routing, probs = make(rank, size, tokens, fp8, pad)
    want_x, want_probs, want_scales, want_counts, _, want_map, _, _ = reference(rank, size, x, scales, routing, probs, pad)
    given = {"routing_map": routing} if by_map else {"topk_idx": idx, "num_of_experts": LOCAL * size}
    if with_probs:
        given.update({"probs": probs} if by_map else {"topk_weights": weights})
    options = {"pad_multiple": pad if pad > 1 else None}
    if non_blocking:
        options.update(non_blocking=True, num_permuted_tokens=(size * 64 * TOPK + LOCAL * pad) // pad * pad)
    rows, got_probs, got_scales, counts, handle = buffer.dispatch_with_permute(hidden=x, scaling_factor=scales, **given, **options)
    n = len(want_x)
    assert len(rows) == (options["num_permuted_tokens"] if non_blocking else n)
    assert counts.tolist() == want_counts.tolist() and counts.dtype == torch.int64
    assert non_blocking or counts.device.type == "cpu"
    filled = torch.cat([torch.arange(count) < int(used) for count, used in zip(want_counts, want_map.sum(0))]) if n else torch.zeros(0).bool()
    equal("rows", rows, want_x, n)
    equal("probs", None if got_probs is None else got_probs[:n][filled], want_probs[filled] if with_probs else None)
    equal("scales", None if got_scales is None else got_scales[:n][filled], want_scales[filled] if fp8 else None)
    _, _, _, received, chosen, *_ = handle
    assert len(handle) == 9 and received.item() == len(want_map) and handle[6] == tokens
    assert not (handle[-1] != 0), "no row was too many"  # as Megatron asks
    equal("map", chosen, want_map, len(want_map))
    hidden = (rows.float() if not fp8 else torch.randn(rows.shape)).to(torch.bfloat16)
    hidden = torch.ones_like(hidden) if fp8 else hidden
    idx.zero_()  # the program's tensor
    out, out_probs = buffer.combine_with_unpermute(hidden=hidden, probs=got_probs, handle=handle, pad_multiple=pad)
    equal("combined", out, back(torch.ones_like(x).to(torch.bfloat16) if fp8 else x, routing))
    equal("combined probs", out_probs, probs if with_probs else None)
    # The same routing again, as the backward pass of a combine does.
    again, none, _, counts_again, same = buffer.dispatch_with_permute(hidden=x, scaling_factor=scales, handle=handle, **options)
    assert none is None and same is handle and counts_again is handle.tokens_per_expert
    equal("rows again", again, want_x, n)


def plain(rank, size, fp8, with_probs):
    buffer = new_buffer()
    tokens = 0 if rank == 1 else 30
    x, scales, idx, weights, routing, probs = make(rank, size, tokens, fp8)
    _, _, _, _, want_x, want_map, want_probs, want_scales = reference(rank, size, x, scales, routing, probs, 1)
    rows, got_probs, got_scales, handle = buffer.dispatch(hidden=x, scaling_factor=scales, topk_idx=idx, num_of_experts=LOCAL * size,
                                                          topk_weights=weights if with_probs else None)
    equal("rows", rows, want_x)
    equal("scales", got_scales, want_scales)
    _, _, _, received, chosen, sent, config = handle
    assert received.item() == len(want_x) and sent == tokens and config is buffer.config
    equal("map", chosen, want_map)
    if with_probs:
        begin = buffer.local_rank * LOCAL
        per_node = LOCAL * buffer.num_of_hybrid_ep_ranks_per_nvlink_domain
        assert got_probs.shape == (len(want_x), per_node)
        equal("probs", got_probs[:, begin:begin + LOCAL], want_probs[:, rank * LOCAL:(rank + 1) * LOCAL])
    hidden = torch.ones(rows.shape, dtype=torch.bfloat16) if fp8 else rows
    out, out_probs = buffer.combine(hidden * chosen.sum(1, keepdim=True), got_probs, handle)
    equal("combined", out, back(torch.ones_like(x).to(torch.bfloat16) if fp8 else x, routing))
    equal("combined probs", out_probs, probs if with_probs else None)
    again, *_ = buffer.dispatch(hidden=x, scaling_factor=scales, handle=handle)
    equal("rows again", again, want_x)


def every_mode(rank, size):
    for fp8 in (False, True):
        for with_probs in (False, True):
            plain(rank, size, fp8, with_probs)
            for by_map in (False, True):
                for pad in (1, 16):
                    for non_blocking in (False, True):
                        permuted(rank, size, fp8, by_map, with_probs, pad, non_blocking)


def test_every_mode_on_2_ranks():
    run(2, every_mode)


def test_every_mode_on_3_ranks():
    run(3, every_mode)


class Dispatch(torch.autograd.Function):
    """As Megatron's dispatcher calls it: named arguments alone, probs with gradients, the handle kept for the backward pass."""

    @staticmethod
    def forward(ctx, buffer, x, routing, probs, most):
        rows, row_probs, scales, counts, handle = buffer.dispatch_with_permute(
            hidden=x, routing_map=routing, probs=probs, scaling_factor=None, num_of_experts_per_rank=LOCAL, pad_multiple=8,
            num_permuted_tokens=most, non_blocking=most is not None)
        ctx.buffer, ctx.handle = buffer, handle
        return rows, row_probs, counts, handle

    @staticmethod
    def backward(ctx, grad_rows, grad_probs, _, __):
        grad, probs = ctx.buffer.combine_with_unpermute(hidden=grad_rows, probs=grad_probs, handle=ctx.handle, pad_multiple=8)
        return None, grad, None, probs, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, rows, handle, most):
        ctx.buffer, ctx.handle, ctx.most = buffer, handle, most
        return buffer.combine_with_unpermute(hidden=rows, handle=handle, pad_multiple=8)[0]

    @staticmethod
    def backward(ctx, grad):
        rows, _, _, _, _ = ctx.buffer.dispatch_with_permute(hidden=grad, scaling_factor=None, handle=ctx.handle, pad_multiple=8,
                                                            num_permuted_tokens=ctx.most, non_blocking=ctx.most is not None)
        return None, rows, None, None


@on_ranks(2)
def test_a_layer_trains(rank, size):
    buffer = new_buffer(num_sms_dispatch_api=16, num_sms_combine_api=20)
    for most in (None, 512):
        x, _, _, _, routing, probs = make(rank, size, 40, False, 3)
        x, probs = x.requires_grad_(), probs.requires_grad_()
        rows, row_probs, counts, handle = Dispatch.apply(buffer, x, routing, probs, most)
        used = int(counts.sum())
        scaled = torch.cat((rows[:used] * row_probs[:used].unsqueeze(1).to(torch.bfloat16), rows[used:] * 0))
        out = Combine.apply(buffer, scaled, handle, most)
        # Every expert leaves a row as it is: the layer multiplies each token by the sum of its probs.
        want = torch.zeros(x.shape)
        for expert in range(LOCAL * size):
            want += (x.detach() * probs.detach()[:, expert:expert + 1].to(torch.bfloat16)).float()
        assert torch.allclose(out.float(), want, rtol=1e-2, atol=1e-2)
        out.float().sum().backward()
        assert torch.allclose(x.grad.float(), probs.detach().sum(1, keepdim=True).expand(x.shape), rtol=2e-2, atol=1e-2)
        want_probs = x.detach().float().sum(1, keepdim=True) * routing
        assert torch.allclose(probs.grad, want_probs, rtol=5e-2, atol=2.0)
        assert not probs.grad[~routing].any()


@on_ranks(2)
def test_probs_are_applied(rank, size):
    buffer = new_buffer()
    x, _, _, _, routing, _ = make(rank, size, 17, False, 5)
    probs = routing.float() * 0.5
    rows, row_probs, _, _, handle = buffer.dispatch_with_permute(hidden=x, routing_map=routing, probs=probs)
    out, got = buffer.combine_with_unpermute(hidden=rows, probs=row_probs, handle=handle, apply_probs_to_hidden=True)
    equal("weighted", out, back(x, routing, routing.sum(1, keepdim=True) * 0.5))
    equal("probs", got, probs)


@on_ranks(2)
def test_what_programs_read(rank, size):
    buffer = new_buffer(100, use_fp8=True, load_cached_kernels=True, use_shared_buffer=False)
    assert (buffer.rank, buffer.group_size, buffer.group) == (rank, size, dist.group.WORLD)
    domain = buffer.num_of_hybrid_ep_ranks_per_nvlink_domain
    assert buffer.num_of_nodes * domain == size and (buffer.node_rank, buffer.local_rank) == divmod(rank, domain)
    assert (buffer.config.hidden_dim, buffer.config.max_num_of_tokens_per_rank, buffer.config.num_of_experts_per_rank) == (HIDDEN, 100, LOCAL)
    assert buffer.configurer.buffer_config is buffer.config and buffer.runtime is not None
    changed = buffer.update_template_config(hidden_dim=512, num_of_tokens_per_rank=300, num_of_stages_dispatch_api=4)
    assert changed.hidden_dim == 512 and changed.num_of_stages_dispatch_api == 4
    assert buffer.config.hidden_dim == HIDDEN and buffer.config.max_num_of_tokens_per_rank == 300
    buffer.empty_jit_cache()
    x, _, idx, _, routing, _ = make(rank, size, 9, False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        buffer.dispatch_with_permute(hidden=x, routing_map=routing, use_host_meta=True)
    assert len(caught) == 1 and "non_blocking" in str(caught[0].message)


@on_ranks(2)
def test_refusals(rank, size):
    buffer = new_buffer()
    x, _, idx, _, routing, probs = make(rank, size, 9, False)
    permute = buffer.dispatch_with_permute
    raises(ValueError, "group None", deep_ep.HybridEPBuffer, None, HIDDEN, 9, LOCAL)
    raises(AssertionError, "routing_map topk_idx handle", permute, hidden=x)
    raises(AssertionError, "num_permuted_tokens", permute, hidden=x, routing_map=routing, non_blocking=True)
    raises(AssertionError, "multiple pad_multiple", permute, hidden=x, routing_map=routing, non_blocking=True, num_permuted_tokens=9,
           pad_multiple=8)
    raises(ValueError, "routing_map torch.bool", permute, hidden=x, routing_map=routing.float())
    raises(ValueError, "routing_map [9, E]", permute, hidden=x, routing_map=routing[1:])
    raises(ValueError, "probs shape", permute, hidden=x, routing_map=routing, probs=probs[:, 1:])
    raises(TypeError, "hidden list", permute, hidden=[1], routing_map=routing)
    raises(TypeError, "handle tuple", permute, hidden=x, handle=(1, 2))
    handle = permute(hidden=x, routing_map=routing)[4]
    plain_handle = buffer.dispatch(hidden=x, routing_map=routing)[3]
    raises(TypeError, "dispatch_with_permute", buffer.combine_with_unpermute, hidden=x, handle=plain_handle)
    raises(TypeError, "HybridEPBuffer.dispatch()", buffer.combine, x, None, handle)
    raises(AssertionError, "probs", buffer.combine_with_unpermute, hidden=x, handle=handle, apply_probs_to_hidden=True)


@on_ranks(2)
def test_more_experts_than_a_token_may_have(rank, size):
    """It is named, also where the host does not look at the map."""
    buffer = new_buffer()
    x, routing = torch.ones(2, HIDDEN, dtype=torch.bfloat16), torch.zeros(2, 100 * size, dtype=torch.bool)
    routing[:, :70] = True

    def complete(**options):
        for _ in range(3):  # on GPUs a later call raises what only the device has seen
            buffer.dispatch_with_permute(hidden=x, routing_map=routing, **options)
            buffer.runtime.synchronize()

    raises(epkit.ArgumentError, "routing_map 70 experts 64", complete)
    words = "routing rank not valid expert exist" if ranks.CUDA else "expert 200"
    raises(epkit.ArgumentError, words, complete, non_blocking=True, num_permuted_tokens=1000)
