/* SPDX-License-Identifier: Apache-2.0 */
/* request.h - a request on its way to the ranks. */
#ifndef EP_BENCH_REQUEST_H
#define EP_BENCH_REQUEST_H

#include "bench/bench.h"

/* What bench_request_to_json() made. 0, or -1 if it is something else. */
int bench_request_from_json(const json_t *json, struct bench_request *ret_request);

#endif
