# SPDX-License-Identifier: Apache-2.0
"""The interface of DeepEP's branch hybrid-ep: HybridEPBuffer, which Megatron, torchtitan and NeMo call for their dispatchers."""
import struct
import warnings
from types import SimpleNamespace
from typing import Any, Iterator, List, Optional, Tuple

import torch
import torch.distributed as dist

import epkit
from epkit._tensors import OfThisProcess, run_untraced, want_integer, want_tensor

from ._rows import _as_given, _check_group, _with_columns
from .buffer import deadline
from .utils.math import align

_MOST_TOPK = 64  # EP_MAX_TOPK of the library
_STRIDE = 1 << 21  # of source ids, which nothing here reads: more tokens than a rank has

# Entries of a handle, by DeepEP's order: with and without permutation.
_TOKENS, _MAP = 3, 4
_PERMUTED, _PLAIN = 9, 7


def indices_to_map(topk_idx: torch.Tensor, topk_weights: Optional[torch.Tensor], num_of_tokens: int,
                   num_of_experts: int) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """(bool [N, E], float32 [N, E] or None) of topk_idx int64 [N, K] (-1: none) and topk_weights [N, K]."""
    want_tensor(topk_idx, "indices_to_map", "topk_idx", "[N, K]")
    chosen = _dense(topk_idx, torch.ones_like(topk_idx, dtype=torch.float32), num_of_experts) > 0
    return chosen, None if topk_weights is None else _dense(topk_idx, topk_weights.float(), num_of_experts)


def _dense(idx: torch.Tensor, values: torch.Tensor, columns: int) -> torch.Tensor:
    """[N, columns] with the values [N, K] at the columns idx [N, K]; those at -1 are dropped."""
    beyond = torch.where(idx < 0, columns, idx).long()
    made = values.new_zeros((idx.shape[0], columns + 1)).scatter_add_(1, beyond, values)
    return made[:, :columns].contiguous()


def _picked(idx: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    """The reverse: [N, K] of the columns idx; 0 where that is -1."""
    return dense.float().gather(1, idx.clamp(min=0).long()).masked_fill_(idx < 0, 0).contiguous()


class HybridEPHandle(OfThisProcess, Tuple[Any, ...]):
    """What a dispatch returns, for the combines that answer it and further dispatches of the same routing.

    As in DeepEP a tuple: [3] is the number of tokens received, an int32 tensor, and [4] bool [n, L], which local experts
    each of them is for. Both are computed when one of them is read first, which is collective: all ranks read it. With
    permutation the last entry is an int32 tensor of one element: 1 where more rows came than num_permuted_tokens. The other
    entries are of no use to a program: the number of tokens sent, the configuration, or None.
    """
    plan: epkit.Plan
    topk_idx: torch.Tensor  # [N, K], as sent
    tokens_per_expert: Optional[torch.Tensor] = None  # with permutation
    recv_idx: Optional[torch.Tensor] = None  # without: int64 [n, K], local numbers
    _read: Optional[List[Any]] = None

    def _all(self) -> List[Any]:
        if self._read is None:
            entries = list(super().__iter__())
            entries[_TOKENS], entries[_MAP] = self._received()
            self._read = entries
        return self._read

    def _received(self) -> Tuple[torch.Tensor, torch.Tensor]:
        plan = self.plan
        local = plan.num_experts // plan.comm.size
        if self.recv_idx is not None:
            chosen = _dense(self.recv_idx, torch.ones_like(self.recv_idx, dtype=torch.float32), local) > 0
            return torch.tensor(self.recv_idx.shape[0], dtype=torch.int32), chosen
        data = plan.metadata(_STRIDE)
        assert data.recv_slot is not None
        ends = align(data.count_exact, plan.alignment).cumsum(0)  # row behind each expert's last one, padding included
        expert = torch.where(data.recv_slot < 0, -1, torch.bucketize(data.recv_slot, ends, right=True))
        valid = torch.arange(len(expert), device=expert.device) < data.n_recv_tokens
        expert = torch.where(valid.unsqueeze(1), expert, -1)
        chosen = _dense(expert, torch.ones_like(expert, dtype=torch.float32), local) > 0
        if plan.fixed:
            return data.n_recv_tokens, chosen
        tokens = data.n_recv_tokens.cpu()
        return tokens, chosen[:int(tokens)]

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index] if isinstance(index, slice) or index % len(self) in (_TOKENS, _MAP) else super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all())


class HybridEPBuffer(OfThisProcess):
    """Dispatch and combine of a group of ranks by a routing map, with and without the permutation of rows by expert.

    Arguments:
        group: process group (gloo or nccl). Its ranks use torch's current CUDA device, or the CPU where there is none
            ($EPKIT_BACKEND=host: always).
        hidden_dim, max_num_of_tokens_per_rank, num_local_experts, use_fp8: kept in `config`; calls may have others.
        num_sms_dispatch_api, num_sms_combine_api: multiprocessors that a call occupies on CUDA; None: the library's default.

    Ignored: the other arguments, which are of kernels and memory that do not exist here. Calls run in torch's current
    stream.

    Attributes: group, rank, group_size, local_rank, node_rank, num_of_nodes, num_of_hybrid_ep_ranks_per_nvlink_domain, config,
    configurer (its buffer_config is config), runtime.
    """

    def __init__(self, group: dist.ProcessGroup, hidden_dim: int, max_num_of_tokens_per_rank: int, num_local_experts: int,
                 use_fp8: bool = False, num_sms_dispatch_api: Optional[int] = None, num_sms_combine_api: Optional[int] = None,
                 num_sms_preprocessing_api: Optional[int] = None, num_blocks_permute: Optional[int] = None,
                 num_blocks_unpermute: Optional[int] = None, load_cached_kernels: bool = False, use_shared_buffer: bool = True,
                 enable_custom_allgather: bool = True, num_of_hybrid_ep_ranks_per_nvlink_domain: Optional[int] = None,
                 use_mnnvl: Optional[bool] = None) -> None:
        if group is None:
            raise ValueError("HybridEPBuffer: group is None, must be a process group")
        self._comm = epkit.Communicator(group, timeout=deadline())
        self.group, self.rank, self.group_size = group, self._comm.rank, self._comm.size
        self.num_of_nodes = self._comm.nodes
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = self.group_size // self.num_of_nodes
        self.node_rank, self.local_rank = divmod(self.rank, self.num_of_hybrid_ep_ranks_per_nvlink_domain)
        self.config = SimpleNamespace(hidden_dim=hidden_dim, max_num_of_tokens_per_rank=max_num_of_tokens_per_rank,
                                      num_of_experts_per_rank=num_local_experts, num_of_nodes=self.num_of_nodes,
                                      num_of_ranks_per_node=self.num_of_hybrid_ep_ranks_per_nvlink_domain, use_fp8=use_fp8)
        self.configurer = SimpleNamespace(buffer_config=self.config)
        self.runtime = self._comm
        self._dispatch_sms, self._combine_sms = num_sms_dispatch_api or 0, num_sms_combine_api or 0

    def empty_jit_cache(self) -> None:
        """Does nothing: nothing is compiled at run time."""

    def update_template_config(self, hidden_dim: Optional[int] = None, num_of_tokens_per_rank: Optional[int] = None,
                               num_local_experts: Optional[int] = None, pad_multiple: Optional[int] = None,
                               use_fp8: Optional[bool] = None, fuse_permute_dispatch: bool = False, **kwargs: Any) -> SimpleNamespace:
        """A copy of `config` with these values; `config` itself grows to num_of_tokens_per_rank. No call needs it."""
        self.config.max_num_of_tokens_per_rank = max(self.config.max_num_of_tokens_per_rank, num_of_tokens_per_rank or 0)
        given = {"hidden_dim": hidden_dim, "num_of_experts_per_rank": num_local_experts, "pad_multiple": pad_multiple, "use_fp8": use_fp8}
        return SimpleNamespace(**{**vars(self.config), **{name: value for name, value in given.items() if value is not None}, **kwargs})

    def dispatch(self, hidden: torch.Tensor, scaling_factor: Optional[torch.Tensor] = None, topk_idx: Optional[torch.Tensor] = None,
                 topk_weights: Optional[torch.Tensor] = None, num_of_experts: Optional[int] = None,
                 probs: Optional[torch.Tensor] = None, routing_map: Optional[torch.Tensor] = None,
                 num_dispatched_tokens_tensor: Optional[torch.Tensor] = None, num_dispatched_tokens: Optional[int] = None,
                 handle: Optional[HybridEPHandle] = None
                 ) -> Tuple[torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor], HybridEPHandle]:
        """Sends each token to the ranks that own one of its experts; rows by (source rank, token). Collective.

        Arguments: see dispatch_with_permute(). Ignored: num_dispatched_tokens_tensor, num_dispatched_tokens.

        Returns (rows [n, H], probs float32 [n, experts of a node] or None, scales or None, handle). Of the probs those of
        this rank's experts are set; the others are 0.
        """
        x, idx, weights, experts = self._inputs("dispatch", hidden, scaling_factor, topk_idx, topk_weights, num_of_experts,
                                                routing_map, probs, handle, False)
        plan = self._comm.plan(idx, experts) if handle is None else handle.plan
        self._comm._use_num_sms(self._dispatch_sms)
        with torch.no_grad():  # as in DeepEP, gradients are the program's
            rows = plan.dispatch(_with_columns(x), weights, want_topk_idx=True)
        assert rows.topk_idx is not None
        if handle is None:
            handle = self._handle(_PLAIN, plan, idx, len(hidden))
            handle.recv_idx = rows.topk_idx
        received = None if rows.topk_weights is None else _dense(self._of_node(rows.topk_idx, experts), rows.topk_weights,
                                                                 experts // self.num_of_nodes)
        return _as_given(hidden, rows), received, rows.scales, handle

    def combine(self, hidden: torch.Tensor, probs: Optional[torch.Tensor] = None, handle: Optional[HybridEPHandle] = None
                ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """Adds up each token's rows, in float32 in rank order, rounded once. Collective.

        Arguments:
            hidden: bfloat16 [n, H], a row for each received one.
            probs: float32 [n, experts of a node]: those of this rank's experts travel back.

        Returns (bfloat16 [N, H], float32 [N, E] or None).
        """
        handle = self._handle_of(handle, "combine", False)
        assert handle.recv_idx is not None
        weights = None if probs is None else _picked(self._of_node(handle.recv_idx, handle.plan.num_experts), probs)
        return self._combine(handle, hidden, weights)

    def dispatch_with_permute(self, *, hidden: torch.Tensor, topk_idx: Optional[torch.Tensor] = None,
                              topk_weights: Optional[torch.Tensor] = None, num_of_experts_per_rank: Optional[int] = None,
                              num_of_experts: Optional[int] = None, use_fp8: Optional[bool] = None,
                              routing_map: Optional[torch.Tensor] = None, probs: Optional[torch.Tensor] = None,
                              scaling_factor: Optional[torch.Tensor] = None, num_permuted_tokens: Optional[int] = None,
                              pad_multiple: Optional[int] = None, handle: Optional[HybridEPHandle] = None, non_blocking: bool = False,
                              fuse_permute_dispatch: bool = False, num_dispatched_tokens: Optional[int] = None,
                              use_host_meta: Optional[bool] = None
                              ) -> Tuple[torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor], Optional[torch.Tensor],
                                         HybridEPHandle]:
        """Sends each token to its experts: a row for each (token, local expert), grouped by expert. Collective.

        Arguments:
            hidden: bfloat16 [N, H], or bytes of fp8 [N, H] (uint8, float8_e4m3fn).
            scaling_factor: of fp8 rows: float32 [N, H/128].
            routing_map: bool [N, E]: the experts of each token, at most 64. Or topk_idx: int64 [N, K] (-1: none) with num_of_experts.
            probs: float32 [N, E]; with topk_idx topk_weights float32 [N, K].
            pad_multiple: rows of each expert are padded with zeros to a multiple of it.
            handle: of an earlier call: the same routing again; then no routing is given.
            non_blocking: the host waits for nothing: rows has num_permuted_tokens rows, and tokens_per_expert is on the device.
                With routing_map the plan is then made for 64 experts of a token: topk_idx is faster. If more rows are
                received, the operation is refused, and a later call raises epkit.ArgumentError.

        Ignored: num_of_experts_per_rank, use_fp8 (both follow from the tensors), fuse_permute_dispatch.

        Returns (rows, probs float32 [rows] or None, scales or None, tokens_per_expert int64 [L], padding included, handle).
        """
        if num_dispatched_tokens is not None or use_host_meta is not None:
            warnings.warn("dispatch_with_permute: num_dispatched_tokens and use_host_meta are deprecated: use non_blocking", stacklevel=2)
            non_blocking = non_blocking if use_host_meta is None else not use_host_meta
        alignment, most = pad_multiple or 1, want_integer(num_permuted_tokens or 0, "dispatch_with_permute", "num_permuted_tokens")
        if non_blocking and (num_permuted_tokens is None or most % alignment):
            raise AssertionError("dispatch_with_permute: non_blocking needs num_permuted_tokens, a multiple of pad_multiple")
        x, idx, weights, experts = self._inputs("dispatch_with_permute", hidden, scaling_factor, topk_idx, topk_weights, num_of_experts,
                                                routing_map, probs, handle, non_blocking)
        if handle is None:
            plan = self._comm.plan(idx, experts, expanded=True, alignment=alignment, zero_padding=True,
                                   max_recv_tokens=max(most, 1) if non_blocking else 0)
        else:
            plan = handle.plan
        self._comm._use_num_sms(self._dispatch_sms)
        with torch.no_grad():
            rows = plan.dispatch(_with_columns(x), weights)
        if handle is None:
            counts = plan._metadata(_STRIDE, None, ("count_exact",)).count_exact if plan.fixed else \
                torch.tensor(plan.recv_per_expert, device="cpu")
            counts = align(counts, alignment).long()
            over = (counts.sum() > most if non_blocking else torch.zeros((), device=hidden.device)).to(torch.int32).view(1)
            handle = self._handle(_PERMUTED, plan, idx, len(hidden), over)
            handle.tokens_per_expert = counts
        return _as_given(hidden, rows), rows.topk_weights, rows.scales, handle.tokens_per_expert, handle

    def combine_with_unpermute(self, *, hidden: torch.Tensor, probs: Optional[torch.Tensor] = None,
                               handle: Optional[HybridEPHandle] = None, pad_multiple: Optional[int] = None,
                               fuse_unpermute_combine: bool = False, num_dispatched_tokens: Optional[int] = None,
                               apply_probs_to_hidden: bool = False) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """Adds up each token's rows, in float32, rounded once. Collective.

        Arguments:
            hidden: bfloat16, as many rows as dispatch_with_permute() returned.
            probs: float32 [rows]: they travel back.
            apply_probs_to_hidden: each row times its prob, rounded to bfloat16, is added.

        Ignored: pad_multiple (the handle has it), fuse_unpermute_combine, num_dispatched_tokens.

        Returns (bfloat16 [N, H], float32 [N, E] or None).
        """
        handle = self._handle_of(handle, "combine_with_unpermute", True)
        if apply_probs_to_hidden:
            if probs is None:
                raise AssertionError("combine_with_unpermute: apply_probs_to_hidden needs probs")
            hidden = (hidden.float() * probs.unsqueeze(1)).to(hidden.dtype)
        return self._combine(handle, hidden, probs)

    # --- common ---

    def _handle(self, entries: int, plan: epkit.Plan, idx: torch.Tensor, tokens: int, *last: torch.Tensor) -> HybridEPHandle:
        behind = (tokens, self.config, *last)
        values: List[Any] = [None] * (entries - len(behind)) + list(behind)
        handle = HybridEPHandle(values)
        handle.plan, handle.topk_idx = plan, idx
        return handle

    def _handle_of(self, handle: Any, call: str, permuted: bool) -> HybridEPHandle:
        if not isinstance(handle, HybridEPHandle) or handle.plan.expanded != permuted:
            raise TypeError(f"{call}: handle is a {type(handle).__name__}, must be what "
                            f"HybridEPBuffer.{'dispatch_with_permute' if permuted else 'dispatch'}() returned")
        _check_group(handle.plan, self._comm, call)
        return handle

    def _of_node(self, local_idx: torch.Tensor, experts: int) -> torch.Tensor:
        """Numbers of this rank's experts as those of its node."""
        return torch.where(local_idx < 0, -1, local_idx + self.local_rank * (experts // self.group_size))

    def _inputs(self, call: str, hidden: torch.Tensor, scales: Optional[torch.Tensor], topk_idx: Optional[torch.Tensor],
                topk_weights: Optional[torch.Tensor], num_experts: Optional[int], routing_map: Optional[torch.Tensor],
                probs: Optional[torch.Tensor], handle: Any, non_blocking: bool
                ) -> Tuple[Any, torch.Tensor, Optional[torch.Tensor], int]:
        """(rows or (rows, scales), choices [N, K], weights [N, K] or None, E)."""
        want_tensor(hidden, call, "hidden", "[N, H]")
        if handle is not None:
            handle = self._handle_of(handle, call, call != "dispatch")
            idx, experts = handle.topk_idx, handle.plan.num_experts
        elif routing_map is not None:
            want_tensor(routing_map, call, "routing_map", "[N, E]")
            if routing_map.dtype != torch.bool or routing_map.shape[0] != hidden.shape[0]:
                raise epkit.ArgumentError(f"{call}: routing_map: shape is {list(routing_map.shape)} of {routing_map.dtype}, must be "
                                          f"[{hidden.shape[0]}, E] of torch.bool")
            idx, experts = self._choices(routing_map, non_blocking), routing_map.shape[1]
        elif topk_idx is not None and num_experts is not None:
            want_tensor(topk_idx, call, "topk_idx", "[N, K]")
            # The handle keeps it, and the program may reuse its tensor.
            idx, experts = topk_idx.clone(memory_format=torch.contiguous_format), want_integer(num_experts, call, "num_of_experts")
        else:
            raise AssertionError(f"{call}: give routing_map, topk_idx and num_of_experts, or a handle")
        weights = topk_weights
        if probs is not None and (routing_map is not None or topk_weights is None):
            want_tensor(probs, call, "probs", "[N, E]")
            if list(probs.shape) != [hidden.shape[0], experts]:
                raise epkit.ArgumentError(f"{call}: probs: shape is {list(probs.shape)}, must be {[hidden.shape[0], experts]}")
            weights = _picked(idx, probs)
        hidden = hidden.contiguous()
        return hidden if scales is None else (hidden, scales), idx, weights if weights is None else weights.float().contiguous(), experts

    def _choices(self, routing_map: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        """int64 [N, K], the same K on all ranks."""
        experts, most = routing_map.shape[1], min(routing_map.shape[1], _MOST_TOPK)
        if not non_blocking:
            mine = int(routing_map.sum(1).max()) if routing_map.shape[0] else 1
            counts = struct.unpack(f"{self.group_size}q", self._comm.allgather_bytes(struct.pack("q", mine)))
            if max(counts) > _MOST_TOPK:
                raise epkit.ArgumentError(f"routing_map: a token of rank {counts.index(max(counts))} has {max(counts)} experts, the most "
                                          f"is {_MOST_TOPK}")
            most = max(1, *counts)
        number = routing_map.cumsum(1)
        place = torch.where(routing_map & (number <= most), number - 1, most)
        every = torch.arange(experts, device=routing_map.device).expand(routing_map.shape)
        idx = torch.full((routing_map.shape[0], most + 1), -1, device=routing_map.device).scatter_(1, place, every)[:, :most].contiguous()
        if experts > _MOST_TOPK:  # a token with more than the most: an expert that does not exist, so that the library names it
            idx[:, 0] = torch.where(number[:, -1] > most, experts, idx[:, 0])
        return idx

    def _combine(self, handle: HybridEPHandle, hidden: torch.Tensor, weights: Optional[torch.Tensor]
                 ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        self._comm._use_num_sms(self._combine_sms)
        with torch.no_grad():
            out, back = handle.plan.combine(hidden.contiguous(), None if weights is None else weights.float().contiguous())
        return out, None if back is None else _dense(handle.topk_idx, back, handle.plan.num_experts)


run_untraced(HybridEPBuffer.dispatch, HybridEPBuffer.combine, HybridEPBuffer.dispatch_with_permute,
             HybridEPBuffer.combine_with_unpermute, HybridEPHandle.__getitem__, HybridEPHandle.__iter__)
