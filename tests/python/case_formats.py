# SPDX-License-Identifier: Apache-2.0
"""Low-latency dispatches that quantise to nvfp4 and mxfp8, against the rules of epkit/lowlatency.h in torch, bit for bit."""
import deep_ep
import epkit
import torch
import torch.distributed as dist
from ranks import on_ranks, raises, run

TOKENS, TOPK = 40, 3


def rows_of(tokens, hidden, seed):
    """Random rows of all magnitudes; some blocks of zeros, of -0, of what is too small for any scale, with NaN and infinity."""
    torch.manual_seed(seed)
    x = torch.randn(tokens, hidden) * torch.exp2(torch.randint(-12, 12, (tokens, hidden // 16, 1)).float()).expand(-1, -1, 16).flatten(1)
    for token, value in enumerate((0.0, -0.0, 1e-30, float("nan"), float("inf"), -3e38)):
        x[token::13, 32:48] = value
        x[token::17, 77] = value
    return x.to(torch.bfloat16)


def nvfp4(x, scale):
    """Codes uint8 [N, H/2] and scales uint8 [N, H/16]."""
    x = x.cpu()
    magnitude = x.float().abs().unflatten(1, (-1, 16))
    amax = magnitude.nan_to_num(0, float("inf")).amax(2)
    scales = (scale * (amax / 6)).clamp(max=448).to(torch.float8_e4m3fn)
    q = torch.where(scales.float() == 0, 0, scale / scales.float())
    v = magnitude * q.unsqueeze(2)
    code = sum((~(v <= most if even else v < most)).to(torch.uint8)
               for most, even in ((0.25, 1), (0.75, 0), (1.25, 1), (1.75, 0), (2.5, 1), (3.5, 0), (5.0, 1)))
    code = code.flatten(1) | (x.view(torch.int16) < 0).to(torch.uint8) << 3
    return code[:, ::2] | code[:, 1::2] << 4, scales.view(torch.uint8)


def mxfp8(x):
    """Codes uint8 [N, H] and scales uint8 [N, H/32]."""
    blocks = x.cpu().float().unflatten(1, (-1, 32))
    factor = blocks.abs().nan_to_num(0, float("inf")).amax(2) / 448
    bits = factor.view(torch.int32)
    scales = ((bits + 0x7fffff) >> 23).clamp(max=254)
    scales = torch.where(bits <= 0x400000, 0, torch.where(factor == float("inf"), 255, scales))
    power = torch.where(scales == 0, 0x400000, torch.where(scales == 255, 0x7fc00000, scales << 23)).to(torch.int32).view(torch.float32)
    value = (blocks / power.unsqueeze(2)).clamp(-448, 448).flatten(1)
    codes = value.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(value.isnan(), 0x7f, codes).to(torch.uint8), scales.to(torch.uint8)


def flat(scales, rows):
    """Scales in tiles as [L, rows, all of a row]."""
    tiles = scales.cpu().view(torch.uint8)
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(tiles.shape[0], -1, tiles.shape[2] * 4)[:, :rows]


def bits(rank, size, hidden):
    experts = 2 * size
    calls = epkit.Communicator().low_latency(TOKENS, hidden, experts, TOPK)
    for seed, (kind, swizzled, scale, hook) in enumerate((
            ("nvfp4", True, 448 * 6 / 4.0, False), ("nvfp4", False, None, True), ("nvfp4", True, 0.37, True), ("mxfp8", False, None, False),
            ("mxfp8", True, None, True))):
        x = rows_of(TOKENS - rank, hidden, 10 * seed + rank)
        idx = torch.randint(-1, experts, (len(x), TOPK))
        got = calls.dispatch(x, idx, nvfp4=kind == "nvfp4", mxfp8=kind == "mxfp8", swizzled=swizzled, hook=hook,
                             global_scale=None if scale is None else torch.tensor(scale))
        if hook:
            got.finish()
        every = [None] * size
        dist.all_gather_object(every, (x.cpu(), idx.cpu()))
        for local in range(2):
            sent = torch.cat([x[(idx == 2 * rank + local).nonzero()[:, 0]] for x, idx in every])
            codes, scales = nvfp4(sent, 1.0 if scale is None else torch.tensor(scale, device="cpu")) if kind == "nvfp4" else mxfp8(sent)
            n = len(sent)
            assert got.count[local].item() == n
            assert torch.equal(got.x[local, :n].cpu().view(torch.uint8), codes), (seed, local)
            received = flat(got.scales, size * TOKENS) if swizzled else got.scales.cpu().view(torch.uint8)
            assert torch.equal(received[local, :n], scales), (seed, local)
    raises(epkit.ArgumentError, "exclude", calls.dispatch, x, idx, nvfp4=True, fp8=True)
    raises(epkit.ArgumentError, "swizzled", calls.dispatch, x, idx, fp8=True, swizzled=True)
    raises(epkit.ArgumentError, "global_scale", calls.dispatch, x, idx, mxfp8=True, global_scale=torch.ones(1))
    raises(epkit.ArgumentError, "global_scale float64 float32", calls.dispatch, x, idx, nvfp4=True,
           global_scale=torch.ones(1, dtype=torch.float64))


def test_bits():
    run(2, bits, 384)
    run(3, bits, 1024)


def nvfp4_values(codes, scales, scale):
    """float32 [L, rows, H] of codes [L, rows, H/2] and of scales in the view of a dispatch."""
    plain = flat(scales.permute(5, 2, 4, 0, 1, 3), codes.shape[1]).view(torch.float8_e4m3fn).float().to(codes.device)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    elements = torch.stack([values[(codes & 15).long()], values[(codes >> 4).long()]], 3).flatten(2)
    return elements * plain.repeat_interleave(16, 2) / scale


@on_ranks(2)
def test_as_engines_call(rank, size):
    """As vLLM (VLLM_DEEPEPLL_NVFP4_DISPATCH) and SGLang do, with the views that FlashInfer's grouped GEMMs take."""
    most, hidden, experts = 72, 512, 2 * size
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
    torch.manual_seed(rank)
    x, idx = torch.randn(most, hidden).to(torch.bfloat16), torch.stack([torch.randperm(experts)[:2] for _ in range(most)])
    scale = torch.full((2,), 448 * 6 / 5.0)  # SGLang repeats it for each local expert
    (rows, scales), count, handle, _, hook = buffer.low_latency_dispatch(
        x, idx, most, experts, use_fp8=False, use_nvfp4=True, x_global_scale=scale, return_recv_hook=True)
    hook()
    assert rows.shape == (size * most, hidden // 2, 2) and rows.dtype == torch.uint8
    assert scales.shape == (32, 4, -(-size * most // 128), 4, hidden // 64, 2) and scales.dtype == torch.float8_e4m3fn
    decoded = nvfp4_values(rows.permute(2, 0, 1), scales, scale[0]).cpu()
    every = [None] * size
    dist.all_gather_object(every, (x.cpu(), idx.cpu()))
    for local in range(2):
        sent = torch.cat([x[(idx == 2 * rank + local).nonzero()[:, 0]] for x, idx in every]).float()
        got = decoded[local, :len(sent)]
        amax = sent.unflatten(1, (-1, 16)).abs().amax(2).repeat_interleave(16, 1)
        assert count[local].item() == len(sent) and ((got - sent).abs() <= amax / 5).all()
    weights = torch.rand(most, 2)
    y = torch.randn(2, size * most, hidden).to(torch.bfloat16)
    assert torch.isfinite(buffer.low_latency_combine(y, idx, weights, handle)[0]).all()
    buffer.destroy()


def rows_received(plan):
    """Without an end to its fixed capacity."""
    tokens = plan.metadata(TOKENS)
    return (tokens.psum_expert[-1] if plan.expanded else tokens.n_recv_tokens).item()


def quantized(rank, size, expanded):
    """Plan.dispatch(quantize=...): the rows of low latency, or those of a program that quantises by itself."""
    comm, hidden, experts = epkit.Communicator(), 1024, 4 * size
    x = rows_of(TOKENS - rank, hidden, rank)
    idx = torch.randint(-1, experts, (len(x), TOPK))
    scale = torch.tensor(448 * 6 / 4.0)
    for fixed in (0, size * TOKENS * TOPK):
        plan = comm.plan(idx, experts, expanded=expanded, max_recv_tokens=fixed)
        for kind, (codes, scales), given in (("nvfp4", nvfp4(x, scale.cpu()), scale), ("nvfp4", nvfp4(x, 1.0), None), ("mxfp8", mxfp8(x), None)):
            codes = codes.to(x.device) if kind == "nvfp4" else codes.to(x.device).view(torch.float8_e4m3fn)
            scales = scales.to(x.device).view(torch.float8_e4m3fn) if kind == "nvfp4" else scales.to(x.device)
            wanted, got = plan.dispatch((codes, scales)), plan.dispatch(x, quantize=kind, global_scale=given)
            n = rows_received(plan)
            for a, b in ((wanted.x, got.x), (wanted.scales, got.scales)):
                assert a.dtype == b.dtype and a.shape == b.shape
                assert torch.equal(a[:n].view(torch.uint8), b[:n].view(torch.uint8)), (kind, expanded)
            again = plan.dispatch(x, quantize=kind, global_scale=given, out=got)
            assert again is got and torch.equal(got.scales[:n].view(torch.uint8), wanted.scales[:n].view(torch.uint8))
    calls = comm.low_latency(TOKENS, hidden, experts, TOPK)
    plan = comm.plan(idx, experts, expanded=True)
    for kind in ("fp8", "ue8m0"):
        got, packed = plan.dispatch(x, quantize=kind, column_major_scales=True), calls.dispatch(x, idx, fp8=True, ue8m0=kind == "ue8m0")
        for local in range(4):
            first, n = plan.expert_start[local], packed.count[local].item()
            assert torch.equal(got.x[first:first + n].view(torch.uint8), packed.x[local, :n].view(torch.uint8))
            assert torch.equal(got.scales[first:first + n].view(torch.int32), packed.scales[local, :n].view(torch.int32))
    raises(epkit.ArgumentError, "'fp4' 'nvfp4'", plan.dispatch, x, quantize="fp4")
    raises(epkit.ArgumentError, "global_scale 'mxfp8'", plan.dispatch, x, quantize="mxfp8", global_scale=scale)
    raises(epkit.ArgumentError, "global_scale without", plan.dispatch, x, global_scale=scale)
    raises(epkit.ArgumentError, "scales with quantize", plan.dispatch, (x, x), quantize="nvfp4")
    raises(epkit.ArgumentError, "x float32", plan.dispatch, x.float(), quantize="nvfp4")
    raises(epkit.ArgumentError, "column_major_scales", plan.dispatch, x, quantize="nvfp4", column_major_scales=True)
    raises(epkit.ArgumentError, "hidden 96", plan.dispatch, x[:, :96].contiguous(), quantize="nvfp4")


def test_dispatch_quantizes():
    for expanded in (False, True):
        run(2, quantized, expanded)
    run(3, quantized, True)
