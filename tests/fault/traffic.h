/* SPDX-License-Identifier: Apache-2.0 */
/* traffic.h - shared by traffic.c and traffic_ll.c. */
#ifndef EP_TESTS_FAULT_TRAFFIC_H
#define EP_TESTS_FAULT_TRAFFIC_H

#include "fault.h"
#include "tests/args.h"

int traffic_experts(const struct traffic *traffic);
int traffic_expert_of(const struct traffic *traffic, int rank, int token, int k);
/* Checks that a row is the given multiple of that of the token. Keeps the first difference. */
bool traffic_check_row(struct traffic *traffic, const char *what, const uint16_t *row, int rank, int token, int times);

ep_status traffic_ll_new(struct traffic *traffic);
ep_status traffic_ll_send(struct traffic *traffic);
ep_status traffic_ll_finish(struct traffic *traffic);
ep_status traffic_ll_combine(struct traffic *traffic);

#endif
