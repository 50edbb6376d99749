/* SPDX-License-Identifier: Apache-2.0 */
#include "core/check.h"

/* Padding after the last field would become undefined bytes of a field in a later release. */
#define NO_TAIL_PADDING(type) _Static_assert(EP_ARGS_FIRST_BYTES(type) == sizeof(type), "tail padding in " #type)
NO_TAIL_PADDING(ep_boot);
NO_TAIL_PADDING(ep_comm_config);
NO_TAIL_PADDING(ep_plan_args);
NO_TAIL_PADDING(ep_dispatch_args);
NO_TAIL_PADDING(ep_combine_args);
NO_TAIL_PADDING(ep_ll_config);
NO_TAIL_PADDING(ep_ll_dispatch_args);
NO_TAIL_PADDING(ep_ll_combine_args);
NO_TAIL_PADDING(ep_plan_update_args);
NO_TAIL_PADDING(ep_plan_metadata);

ep_status ep_check_range(const char *call, const char *name, int64_t value, int64_t least, int64_t most)
{
    if (value < least || value > most)
        return ep_fail(EP_E_ARG, "%s: %s is %lld, not in %lld..%lld", call, name, (long long)value, (long long)least,
                       (long long)most);
    return EP_OK;
}

ep_status ep_check_flags(const char *call, uint32_t flags, uint32_t known)
{
    if (flags & ~known)
        return ep_fail(EP_E_ARG, "%s: flags has unknown bits 0x%x", call, flags & ~known);
    return EP_OK;
}

ep_status ep_check_reserved(const char *call, uint32_t reserved)
{
    return reserved ? ep_fail(EP_E_ARG, "%s: reserved is %u, not 0", call, reserved) : EP_OK;
}

ep_status ep_check_idx_type(const char *call, int idx_type)
{
    if (idx_type != EP_I32 && idx_type != EP_I64)
        return ep_fail(EP_E_ARG, "%s: idx_type is %d (%s), neither EP_I32 nor EP_I64", call, idx_type,
                       ep_dtype_name((ep_dtype)idx_type));
    return EP_OK;
}

ep_status ep_check_experts(const char *call, const ep_comm *comm, int n_experts)
{
    EP_TRY(ep_check_range(call, "n_experts", n_experts, 1, EP_MAX_EXPERTS));
    if (n_experts % comm->nranks)
        return ep_fail(EP_E_ARG, "%s: n_experts %d is not a multiple of the %d ranks", call, n_experts, comm->nranks);
    return EP_OK;
}

ep_status ep_check_buffer(const char *call, const char *name, const void *buffer, bool empty, size_t align)
{
    if (!buffer && !empty)
        return ep_fail(EP_E_ARG, "%s: %s is NULL", call, name);
    if ((uintptr_t)buffer % align)
        return ep_fail(EP_E_ALIGN, "%s: %s is %p, not aligned to %zu bytes", call, name, buffer, align);
    return EP_OK;
}

ep_status ep_check_product(const char *call, const char *name, int64_t a, int64_t b, int64_t c, int64_t *ret_product)
{
    int64_t product;

    if (!ep_mul(a, b, &product) || !ep_mul(product, c, &product))
        return ep_fail(EP_E_OVERFLOW, "%s: %s has %lld * %lld * %lld bytes", call, name, (long long)a, (long long)b,
                       (long long)c);
    if (ret_product)
        *ret_product = product;
    return EP_OK;
}

static bool overlap(const struct ep_buffer *a, const struct ep_buffer *b)
{
    uintptr_t a_at = (uintptr_t)a->at, b_at = (uintptr_t)b->at;

    if (!a->at || !b->at || a->bytes <= 0 || b->bytes <= 0)
        return false;
    /* Compare distances instead of ends, because an end may wrap around. */
    return a_at <= b_at ? b_at - a_at < (uint64_t)a->bytes : a_at - b_at < (uint64_t)b->bytes;
}

ep_status ep_check_no_overlap(const char *call, const struct ep_buffer *buffers, int n_outputs, int n)
{
    for (int i = 0; i < n_outputs; i++)
        for (int j = i + 1; j < n; j++)
            if (overlap(&buffers[i], &buffers[j]))
                return ep_fail(EP_E_ARG, "%s: %s overlaps %s", call, buffers[i].name, buffers[j].name);
    return EP_OK;
}

ep_status ep_check_buffers(const char *call, const struct ep_buffer *buffers, int n_outputs, int n)
{
    for (const struct ep_buffer *b = buffers; b < buffers + n; b++)
        if (b->align)
            EP_TRY(ep_check_buffer(call, b->name, b->at, !b->required, b->align));
    return ep_check_no_overlap(call, buffers, n_outputs, n);
}

ep_status ep_check_out_strides(const char *call, int64_t token, int64_t block, int64_t rows, int64_t words,
                               int64_t room)
{
    /* The larger stride must step over a whole run of the smaller one. With one row or one word there are no runs. */
    bool apart = token > 0 && block > 0 &&
                 (rows == 1 || words == 1 ||
                  (token < block ? rows - 1 <= (block - 1) / token : words - 1 <= (token - 1) / block));
    int64_t over_rows, over_words, last;

    /* A rank that receives nothing may have strides derived from its 0 rows. */
    if (!rows || !words)
        return EP_OK;
    if (!apart)
        return ep_fail(EP_E_ARG,
                       "%s: strides %lld (token) and %lld (block) of recv_scales give two of %lld x %lld "
                       "elements the same address",
                       call, (long long)token, (long long)block, (long long)rows, (long long)words);
    if (!ep_mul(token, rows - 1, &over_rows) || !ep_mul(block, words - 1, &over_words) ||
        __builtin_add_overflow(over_rows, over_words, &last) || last > INT64_MAX / 8)
        return ep_fail(EP_E_OVERFLOW, "%s: strides %lld and %lld of recv_scales over %lld rows", call, (long long)token,
                       (long long)block, (long long)rows);
    if (room && last >= room)
        return ep_fail(EP_E_ARG, "%s: strides %lld and %lld of recv_scales reach element %lld of the %lld of an expert",
                       call, (long long)token, (long long)block, (long long)last, (long long)room);
    return EP_OK;
}
