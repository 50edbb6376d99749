/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes as a list of hosts and as a hostfile: what is accepted is a target for ssh that is
 * no option, and there are not too many.
 */
#include "cmd/launch/hosts.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST_BYTES = 1024 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(struct hosts *hosts)
{
    if (hosts->n < 0 || hosts->n > HOSTS_MAX)
        abort();
    for (int i = 0; i < hosts->n; i++) {
        const struct host *host = &hosts->list[i];

        if (!*host->target || *host->target == '-' || *host_name(host) == '-' || !*host_name(host))
            abort();
        if (strpbrk(host->target, " \t\n'\"\\$`;&|<>()[]"))
            abort();
        if (*host->port && (atoi(host->port) < 1 || atoi(host->port) > 65535))
            abort();
    }
    hosts_done(hosts);
}

/* A regular file without a name. */
static void check_file(const uint8_t *data, size_t size)
{
    struct hosts hosts = {0}, slots = {0};
    int fd = memfd_create("hosts", MFD_CLOEXEC);
    char path[64];

    if (fd < 0 || write(fd, data, size) != (ssize_t)size)
        abort();
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    hosts_add_file(path, HOSTS_OPEN_MPI, &hosts);
    check(&hosts);
    hosts_add_file(path, HOSTS_REPEATED, &slots);
    check(&slots);
    close(fd);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct hosts hosts = {0};
    char text[MOST_BYTES + 1];

    if (size > MOST_BYTES)
        return 0;
    memcpy(text, data, size);
    text[size] = '\0';
    hosts_add_list("list", text, &hosts);
    check(&hosts);
    check_file(data, size);
    return 0;
}
