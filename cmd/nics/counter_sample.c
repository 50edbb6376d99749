/* SPDX-License-Identifier: Apache-2.0 */
/* counter_sample.c - reads the counters of a device; arithmetic with wrap-around. */
#include "counter_sample.h"

#include "base/clock.h"

#include <stdio.h>
#include <string.h>

#define TWO_32 (UINT64_C(1) << 32)

/*
 * Traffic of a port without the counters of the specification: EFA counts it in its driver, in bytes. In units of the
 * row; SOURCE_OK, or SOURCE_ABSENT also of what a snapshot did not record.
 */
static enum source_state read_substitute(struct source *source, const struct counter_device *device,
                                         const struct counter_row *row, uint64_t *ret_value)
{
    static const char *const files[] = {[COUNTER_SENT] = "hw_counters/tx_bytes",
                                        [COUNTER_RECEIVED] = "hw_counters/rx_bytes",
                                        [COUNTER_SENT_PACKETS] = "hw_counters/tx_pkts",
                                        [COUNTER_RECEIVED_PACKETS] = "hw_counters/rx_pkts"};
    char path[COUNTER_PATH_BYTES];

    if (source_number_uncached(source, ret_value, "%s", counter_path(device, files[row->kind], path)) != SOURCE_OK)
        return SOURCE_ABSENT;
    *ret_value /= (uint64_t)row->scale;
    return SOURCE_OK;
}

/* The statistics of the driver; a new reference. */
static json_t *query_driver(struct source *source, const struct counter_device *device)
{
    char question[COUNTER_PATH_BYTES];

    if (!device->netdev || !*device->netdev)
        return NULL;
    if (source_is_live(source))
        return ethtool_query((void *)device->netdev);
    snprintf(question, sizeof(question), COUNTER_QUERY_NAME, device->netdev);
    return json_incref((json_t *)source_query(source, question, ethtool_query, (void *)device->netdev, 0).value);
}

void counter_read(struct source *source, const struct counter_device *device, enum counter_kind last,
                  struct counter_sample *ret_sample)
{
    struct counter_sample sample = {.at_ns = (int64_t)ep_now_ns()};
    struct counter_rows rows = counter_rows(device->rdma);
    json_t *driver = last == COUNTER_CONGESTION ? query_driver(source, device) : NULL;
    char path[COUNTER_PATH_BYTES];

    for (size_t i = 0; i < rows.n; i++) {
        const char *slash = strchr(rows.at[i].file, '/');
        const json_t *value = slash ? json_object_get(driver, slash + 1) : NULL;

        sample.states[i] = SOURCE_NOT_RECORDED;
        if (rows.at[i].kind > last)
            continue;
        if (*counter_path(device, rows.at[i].file, path)) {
            sample.states[i] = source_number_uncached(source, &sample.values[i], "%s", path);
            if (sample.states[i] == SOURCE_ABSENT && device->rdma && rows.at[i].kind <= COUNTER_RECEIVED_PACKETS)
                sample.states[i] = read_substitute(source, device, &rows.at[i], &sample.values[i]);
        } else {
            sample.states[i] = json_is_integer(value) && json_integer_value(value) >= 0 ? SOURCE_OK : SOURCE_ABSENT;
            sample.values[i] = sample.states[i] == SOURCE_OK ? (uint64_t)json_integer_value(value) : 0;
        }
        sample.known[i] = sample.states[i] == SOURCE_OK;
    }
    json_decref(driver);
    *ret_sample = sample;
}

bool counter_may_wrap(const struct counter_device *device, const struct counter_sample *sample)
{
    struct counter_rows rows = counter_rows(device->rdma);
    bool any = false;

    for (size_t i = 0; i < rows.n; i++) {
        if (rows.at[i].kind != COUNTER_SENT && rows.at[i].kind != COUNTER_RECEIVED)
            continue;
        if (!sample->known[i])
            continue;
        if (sample->values[i] >= TWO_32)
            return false;
        any = true;
    }
    return any;
}

/* The increment, in units of the file. */
static uint64_t value_moved(uint64_t before, uint64_t after, bool *ret_reset)
{
    uint64_t back = before - after, across = 0 - back;

    *ret_reset = false;
    if (after >= before)
        return after - before;
    if (before < TWO_32)
        across = TWO_32 - back;
    if (across < back)
        return across;
    *ret_reset = true;
    return after;
}

bool counter_moved(const struct counter_device *device, size_t row, const struct counter_sample *before,
                   const struct counter_sample *after, uint64_t *ret_amount, bool *ret_reset)
{
    struct counter_rows rows = counter_rows(device->rdma);
    uint64_t amount;

    if (row >= rows.n || !before->known[row] || !after->known[row])
        return false;
    amount = value_moved(before->values[row], after->values[row], ret_reset);
    if (__builtin_mul_overflow(amount, (uint64_t)rows.at[row].scale, &amount))
        amount = UINT64_MAX;
    *ret_amount = amount;
    return true;
}
