/* SPDX-License-Identifier: Apache-2.0 */
/* net_conformance.h - conformance tests for all network engines (net/net.h), on four ranks. */
#ifndef EP_TESTS_UNIT_NET_CONFORMANCE_H
#define EP_TESTS_UNIT_NET_CONFORMANCE_H

#include "net/net.h"

enum { NET_CONFORMANCE_RANKS = 4 };

/* Must not return, because the other ranks would wait for this one. */
typedef void (*net_conformance_fail_fn)(int rank, const char *test, int line, const char *condition);

/* Collective. */
void net_conformance_run(const struct ep_net_provider *provider, const ep_boot *boot, net_conformance_fail_fn fail);

#endif
