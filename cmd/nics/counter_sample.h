/* SPDX-License-Identifier: Apache-2.0 */
/* counter_sample.h - samples of the counters of a device, and the difference between two of them. */
#ifndef EP_NICS_COUNTER_SAMPLE_H
#define EP_NICS_COUNTER_SAMPLE_H

#include "machine/hardware/counters.h"

struct counter_sample {
    int64_t at_ns; /* CLOCK_MONOTONIC */
    bool known[COUNTER_ROWS_MAX];
    uint64_t values[COUNTER_ROWS_MAX];          /* as in the file, not scaled */
    enum source_state states[COUNTER_ROWS_MAX]; /* why it is unknown; SOURCE_NOT_RECORDED when it was not read */
};

/* Reads the counters of kinds up to `last`: with COUNTER_RECEIVED_PACKETS four files. */
void counter_read(struct source *source, const struct counter_device *device, enum counter_kind last,
                  struct counter_sample *ret_sample);

/*
 * May the data counters of the device have 32 bits? True as long as none has exceeded 2^32. A link of 400 Gbit/s wraps
 * such a counter in 0.34 s, so it has to be read at least twice in that time.
 */
bool counter_may_wrap(const struct counter_device *device, const struct counter_sample *sample);

/*
 * The increment of counter `row` from `before` to `after`, in bytes for data. A counter that decreased has wrapped
 * around, at 2^32 if both values are below that and at 2^64 otherwise, if the increment by wrapping is smaller than the
 * decrease; otherwise it was reset: the result is the new value, and *ret_reset is set. False when one of the two is
 * unknown.
 */
bool counter_moved(const struct counter_device *device, size_t row, const struct counter_sample *before,
                   const struct counter_sample *after, uint64_t *ret_amount, bool *ret_reset);

#endif
