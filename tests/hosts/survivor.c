/* SPDX-License-Identifier: Apache-2.0 */
/*
 * survivor.c - a rank that runs barriers until one fails, forms a group with the ranks that answer, and stays in it
 * until it is ended.
 *
 * survivor TIMEOUT_MS TRIES; the rest is in the environment, as ep_boot_tcp_new() reads it.
 */
#define _GNU_SOURCE

#include <epkit/epkit.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static int fail(const char *what, ep_status status)
{
    printf("%s: %s: %s\n", what, ep_status_name(status), ep_last_error());
    return EXIT_FAILURE;
}

int main(int argc, char **argv)
{
    ep_boot_tcp_args args = EP_BOOT_TCP_ARGS_INIT;
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    ep_comm_info info = EP_COMM_INFO_INIT;
    ep_boot_tcp *boot;
    ep_comm *comm, *next = NULL;
    ep_status status;

    if (argc != 3)
        return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    args.timeout_ms = 60000;
    status = ep_boot_tcp_new(&args, &boot);
    if (status != EP_OK)
        return fail("no bootstrap", status);
    config.backend = "host";
    config.network = "tcp";
    config.ranks_per_node = 1;
    config.timeout_ms = (int32_t)strtol(argv[1], NULL, 10);
    status = ep_comm_new(ep_boot_tcp_get(boot), &config, &comm);
    ep_boot_tcp_free(boot);
    if (status != EP_OK)
        return fail("no communicator", status);
    for (int i = 0; status == EP_OK; i++) {
        status = ep_comm_barrier(comm);
        if (i == 10)
            puts("begun");
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    fail("a barrier", status);
    for (long tries = strtol(argv[2], NULL, 10); tries > 0 && status != EP_OK && status != EP_E_EXCLUDED; tries--)
        status = ep_comm_shrink(comm, NULL, &next);
    if (status != EP_OK)
        return fail("no group", status);
    ep_comm_free(comm); /* closes its connections: this is how a death appears to a host that comes back */
    ep_comm_get_info(next, &info);
    printf("a group of %d\n", info.nranks);
    pause();
    return EXIT_SUCCESS;
}
