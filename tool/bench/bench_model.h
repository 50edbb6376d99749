/* SPDX-License-Identifier: Apache-2.0 */
/* bench_model.h - what an ideal machine of n nodes would do, by docs/model.md. */
#ifndef EP_TOOL_BENCH_MODEL_H
#define EP_TOOL_BENCH_MODEL_H

#include "bench/bench.h"
#include "cmd.h"

/*
 * Rows for each number of nodes and each operation and type of the request, with the published figure of the same kind
 * of machine where there is one. *ret_title: of the machines, "" if `hardware` is not known (*ret_known: names that
 * are). NULL then; else a new reference.
 */
json_t *bench_model(const struct bench_request *request, const struct opt_list *nodes, const char *hardware,
                    char *ret_title, size_t title_bytes, char *ret_known, size_t known_bytes);

/* The rows as a table. 0, or -1 after reporting that they could not be written. */
int bench_model_print(json_t *rows, bool csv);

#endif
