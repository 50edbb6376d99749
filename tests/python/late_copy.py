# SPDX-License-Identifier: Apache-2.0
"""A kernel that lets the next one of its stream start long before it writes (programmatic dependent launch)."""
import torch
import triton
import triton.language as tl

WORDS, DELAY_NS = 4096, 300_000


@triton.jit
def _copy_late(to, value, n, delay_ns, WORDS: tl.constexpr):
    tl.extra.cuda.gdc_launch_dependents()
    end = tl.extra.cuda.globaltimer() + delay_ns
    while tl.extra.cuda.globaltimer() < end:
        pass
    at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    tl.store(to + at, tl.load(value + at, mask=at < n), mask=at < n)


def copy_late(to, value):
    """`to` becomes `value`; blocks of the next kernel may be running before."""
    to, value = to.view(-1).view(torch.int32), value.contiguous().view(-1).view(torch.int32)
    _copy_late[(triton.cdiv(to.numel(), WORDS),)](to, value, to.numel(), DELAY_NS, WORDS=WORDS)
