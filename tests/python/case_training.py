# SPDX-License-Identifier: Apache-2.0
"""A small mixture of experts trains the same loss curve on 1 and on 4 ranks, and that of a dense computation."""
import json
import os
import tempfile

import epkit
import torch
import torch.distributed as dist
from ranks import need_operators, on_ranks, raises, run

TOKENS, HIDDEN, EXPERTS, TOPK, STEPS, INNER = 32, 64, 8, 2, 6, 32


class Model:
    """A router and experts of two matrices; this rank has experts first .. first + count - 1.

    In double: how a matrix product of other sizes rounds must not decide how a row rounds to bfloat16.
    """

    def __init__(self, first, count):
        torch.manual_seed(0)
        router = torch.randn(HIDDEN, EXPERTS, dtype=torch.float64) * 0.3
        up = torch.randn(EXPERTS, HIDDEN, INNER, dtype=torch.float64) * 0.2
        down = torch.randn(EXPERTS, INNER, HIDDEN, dtype=torch.float64) * 0.2
        self.router = router.requires_grad_()
        self.up = up[first:first + count].clone().requires_grad_()
        self.down = down[first:first + count].clone().requires_grad_()

    def route(self, x):
        weights, idx = torch.softmax(x.double() @ self.router, 1).topk(TOPK)
        return idx, (weights / weights.sum(1, keepdim=True)).float()

    def expert(self, number, rows):
        return torch.relu(rows.double() @ self.up[number]) @ self.down[number]

    def experts(self, rows, counts):
        parts, begin = [], 0
        for number, count in enumerate(counts):
            parts.append(self.expert(number, rows[begin:begin + count]))
            begin += count
        return torch.cat(parts)

    def step(self, rate=0.05):
        with torch.no_grad():
            for parameter in (self.router, self.up, self.down):
                parameter -= rate * parameter.grad
                parameter.grad = None


def data(step):
    torch.manual_seed(100 + step)
    return torch.randn(TOKENS, HIDDEN).to(torch.bfloat16), torch.randn(TOKENS, HIDDEN)


def train(rank, size, path):
    comm = epkit.Communicator()
    own = EXPERTS // size
    model, losses = Model(rank * own, own), []
    for step in range(STEPS):
        x, target = (part.chunk(size)[rank] for part in data(step))
        idx, weights = model.route(x)
        out = epkit.moe(comm, x.contiguous(), idx, weights, EXPERTS, model.experts, alignment=4)
        loss = (out.double() - target).square().sum() / TOKENS
        loss.backward()
        dist.all_reduce(model.router.grad)
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
        model.step()
    keep(losses, path, rank)


def keep(losses, path, rank):
    if rank == 0:
        with open(path, "w", encoding="ascii") as file:
            json.dump(losses, file)


def dense(rank, size, path):
    """Every expert on every token, weighted, with the roundings of a layer: each weighted row to bfloat16."""
    model, losses = Model(0, EXPERTS), []
    for step in range(STEPS):
        x, target = data(step)
        idx, weights = model.route(x)
        gate = torch.zeros(TOKENS, EXPERTS).scatter(1, idx, weights)
        out = torch.zeros(TOKENS, HIDDEN)
        for number in range(EXPERTS):
            out = out + (model.expert(number, x).float() * gate[:, number:number + 1]).to(torch.bfloat16).float()
        loss = (out.to(torch.bfloat16).double() - target).square().sum() / TOKENS
        loss.backward()
        losses.append(loss.item())
        model.step()
    keep(losses, path, rank)


def curve(function, size):
    """Losses of a training, in ranks of its own: a backward pass here would begin CUDA in the parent of all of them."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "losses")
        run(size, function, path)
        with open(path, encoding="ascii") as file:
            return json.load(file)


def test_loss_curve_of_1_and_4_ranks_and_dense():
    one, four, reference = curve(train, 1), curve(train, 4), curve(dense, 1)
    assert one[-1] < one[0] * 0.98, one
    for a, b, c in zip(one, four, reference):
        # Rows and their gradients are the same bits on 1 and 4 ranks; the dense computation's gradients are no bfloat16.
        assert abs(a - b) < 1e-9 * abs(a) and abs(a - c) < 2e-3 * abs(a), (one, four, reference)


def layer_of_ops(comm, experts):
    """The layer by the operators of torch.library: the rank layout, each row with all of its experts here."""
    import epkit.ops

    slot = epkit.ops.register(comm, EXPERTS)

    def layer(x, idx, weights):
        rows, local, w, plan = torch.ops.epkit.moe_dispatch(x, idx, weights, slot, TOKENS)
        y = torch.zeros(rows.shape, dtype=torch.float64)
        for number in range(EXPERTS // comm.size):
            gate = torch.where(local == number, w, 0).sum(1, keepdim=True)
            y = y + experts(number, rows) * gate
        return torch.ops.epkit.moe_combine(y.to(torch.bfloat16), plan, slot, x.shape[0])

    return layer


def layer_gradients(rank, size):
    """Of a layer's input and of all of its parameters, against a dense computation in double."""
    comm = epkit.Communicator()
    own = EXPERTS // size
    x_all, given = data(7)
    dense_model, dense_x = Model(0, EXPERTS), x_all.double().requires_grad_()
    weights, idx = torch.softmax(dense_x @ dense_model.router, 1).topk(TOPK)
    gate = torch.zeros(TOKENS, EXPERTS, dtype=torch.float64).scatter(1, idx, weights / weights.sum(1, keepdim=True))
    want_out = sum(dense_model.expert(number, dense_x) * gate[:, number:number + 1] for number in range(EXPERTS))
    want_out.backward(given.double())
    for by_ops in (False, True):
        model, x = Model(rank * own, own), x_all.chunk(size)[rank].clone().requires_grad_()
        idx, weights = model.route(x)
        if by_ops:
            out = layer_of_ops(comm, model.expert)(x, idx, weights)
        else:
            out = epkit.moe(comm, x, idx, weights, EXPERTS, model.experts, alignment=4)
        out.backward(given.chunk(size)[rank].to(torch.bfloat16))
        dist.all_reduce(model.router.grad)
        local = slice(rank * own, (rank + 1) * own)
        for name, got, want in (("out", out, want_out.chunk(size)[rank]), ("x", x.grad, dense_x.grad.chunk(size)[rank]),
                                ("router", model.router.grad, dense_model.router.grad),
                                ("up", model.up.grad, dense_model.up.grad[local]),
                                ("down", model.down.grad, dense_model.down.grad[local])):
            error = (got.double() - want).norm() / want.norm()
            assert 0 < want.norm() and error < 0.01, f"{name}, by operators: {by_ops}: {error}"


def test_gradients_of_a_layer_are_those_of_dense():
    need_operators()
    run(2, layer_gradients)
    run(4, layer_gradients)


@on_ranks(2)
def test_gradients_are_exact(rank, size):
    """Of dispatch and combine, against those of a dense computation with exact numbers."""
    comm = epkit.Communicator()
    experts, tokens, hidden = 2 * size, 10, 32
    torch.manual_seed(rank)
    topk_idx = torch.rand(tokens, experts).topk(2).indices
    topk_idx[0, 1] = -1
    topk_idx[1:3, 1] = topk_idx[1:3, 0]  # an expert twice
    x = torch.randint(-3, 4, (tokens, hidden)).to(torch.bfloat16).requires_grad_()
    weights = torch.randint(1, 4, (tokens, 2)).float().requires_grad_()
    for expanded in (False, True):
        plan = comm.plan(topk_idx, experts, expanded=expanded, alignment=4, zero_padding=True)
        rows, w = epkit.dispatch(plan, x, weights)
        out = epkit.combine(plan, (rows.float() * (w.unsqueeze(1) if expanded else w.sum(1, keepdim=True))).to(torch.bfloat16))
        total = weights.masked_fill(topk_idx < 0, 0).sum(1, keepdim=True)
        assert torch.equal(out.float(), x.detach().float() * total)
        gx, gw = torch.autograd.grad(out.float().sum(), (x, weights))
        assert torch.equal(gx.float(), total.expand_as(x)), "gradient of x"
        assert torch.equal(gw, x.detach().float().sum(1, keepdim=True).expand(-1, 2).masked_fill(topk_idx < 0, 0))


@on_ranks(2)
def test_limits_of_a_layer(rank, size):
    """What a layer cannot do is refused, instead of a result that looks like one."""
    comm = epkit.Communicator()
    torch.manual_seed(rank)
    topk_idx, weights = torch.rand(6, 2 * size).topk(2).indices, torch.rand(6, 2).requires_grad_()
    x = torch.randn(6, 32).to(torch.bfloat16).requires_grad_()
    for experts, words in ((lambda rows, counts: rows[:1], "experts [1, 32]"), (lambda rows, counts: None, "experts NoneType")):
        raises(epkit.ArgumentError, "moe shape " + words, epkit.moe, comm, x, topk_idx, weights, 2 * size, experts)
    out = epkit.moe(comm, x, topk_idx, weights, 2 * size, lambda rows, counts: rows * rows)
    grads = torch.autograd.grad(out.float().sum(), (x, weights), create_graph=True)
    for grad in grads:  # of which a gradient would have to go through dispatch and combine again
        raises(RuntimeError, "twice once_differentiable", grad.float().sum().backward)


def once(rank, size):
    """Of operators, too: torch would take the gradient of those of a backward pass for 0."""
    x_all, _ = data(7)
    model, x = Model(rank * EXPERTS // size, EXPERTS // size), x_all.chunk(size)[rank].clone().requires_grad_()
    out = layer_of_ops(epkit.Communicator(), model.expert)(x, *model.route(x))
    grad, = torch.autograd.grad(out.float().square().sum(), x, create_graph=True)
    raises(RuntimeError, "gradient of a gradient moe_dispatch", torch.autograd.grad, grad.float().square().sum(), x)


def test_operators_are_differentiable_once():
    need_operators()
    run(2, once)


def forward(rank, size):
    """Forward mode, of which torch would take the derivative of an operator for 0, is refused."""
    import epkit.ops as ops

    comm = epkit.Communicator()
    slot = ops.register(comm, size)
    idx, weights = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    x = torch.ones(3, 32, dtype=torch.bfloat16)
    plan = comm.plan(idx, size)
    own = torch.ops.epkit.moe_dispatch(x, idx, weights, slot, 3 * size)[3]
    y = torch.ones(3 * size, 32, dtype=torch.bfloat16)
    for given, words, call in ((x, "moe_dispatch", lambda one: torch.ops.epkit.moe_dispatch(one, idx, weights, slot, 3 * size)[0]),
                               (y, "moe_combine", lambda one: torch.ops.epkit.moe_combine(one, own, slot, 3)),
                               (x, "", lambda one: epkit.dispatch(plan, one)[0]),
                               (y[:plan.n_recv], "", lambda one: epkit.combine(plan, one))):
        with torch.autograd.forward_ad.dual_level():
            raises(NotImplementedError, words, call, torch.autograd.forward_ad.make_dual(given, given))
        raises((NotImplementedError, RuntimeError), words, torch.func.jvp, call, (given,), (given,))
        call(given)  # which works afterwards, and works alike on all ranks


def test_forward_mode_is_refused():
    need_operators()
    run(2, forward)


@on_ranks(2)
def test_gradients_of_spare_rows_are_0(rank, size):
    """A plan of fixed capacity: rows that nobody sent get a gradient of 0, as many as there are."""
    comm = epkit.Communicator()
    torch.manual_seed(rank)
    topk_idx = torch.rand(6, 2 * size).topk(2).indices
    for expanded in (False, True):
        plan = comm.plan(topk_idx, 2 * size, expanded=expanded, max_recv_tokens=40)
        data = plan.metadata(6)
        received = int(data.count_exact.sum() if expanded else data.n_recv_tokens)
        # On a GPU the counts are not on the host: rows are there for the whole capacity.
        for rows in (40, 50) + (() if plan.comm.is_cuda else (received,)):
            y = torch.randn(rows, 32).to(torch.bfloat16).requires_grad_()
            epkit.combine(plan, y).float().sum().backward()
            assert torch.equal(y.grad[:received], torch.ones_like(y)[:received]) and not y.grad[received:].any()
