/* SPDX-License-Identifier: Apache-2.0 */
/* render.h - prints measurements as text and CSV. */
#ifndef EP_BENCH_RENDER_H
#define EP_BENCH_RENDER_H

#include "common/output.h"

#include <jansson.h>

/* `rows` of bench_collect(). 0, or -1 after reporting a write error. */
int bench_print_rows(const json_t *rows, const char *device, enum out_format format);

/* The phases of each operation. */
int bench_print_phases(const json_t *rows, const char *device);

/* "8 ranks: dispatch runs at 0.92 of memcpy and 3.4 times MPI_Alltoallv, ...": of the largest group and token count. */
void bench_verdict(const json_t *rows, char *ret_text, size_t bytes);

/* The lines below the table: memory, cost of a new routing. */
void bench_print_notes(const json_t *rows, const json_t *memory);

#endif
