/* SPDX-License-Identifier: Apache-2.0 */
/* bench_model.h - performance model of ideal machines with n nodes, see docs/model.md. */
#ifndef EP_BENCH_BENCH_MODEL_H
#define EP_BENCH_BENCH_MODEL_H

#include "bench.h"
#include "common/cmd.h"

/*
 * A row for each number of nodes, operation and type of the request, with the published result of such a machine if
 * there is one. *ret_title: name of the machines. If `hardware` is unknown: NULL, *ret_title is "" and *ret_known lists
 * the known names; otherwise a new reference.
 */
json_t *bench_model(const struct bench_request *request, const struct opt_list *nodes, const char *hardware,
                    char *ret_title, size_t title_bytes, char *ret_known, size_t known_bytes);

/* Prints the rows as a table. 0, or -1 after reporting a write error. */
int bench_model_print(json_t *rows, bool csv);

#endif
