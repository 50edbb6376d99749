/* SPDX-License-Identifier: Apache-2.0 */
/* request.h - parses a request on the ranks. */
#ifndef EP_BENCH_REQUEST_H
#define EP_BENCH_REQUEST_H

#include "bench/bench.h"

/* Parses the output of bench_request_to_json(). 0, or -1 if it is malformed. */
int bench_request_from_json(const json_t *json, struct bench_request *ret_request);

#endif
