/* SPDX-License-Identifier: Apache-2.0 */
/* pause.c - the first process of a pod's sandbox: waits for its end. */
#include <signal.h>
#include <unistd.h>

static void stop(int number)
{
    (void)number;
    _exit(0);
}

int main(void)
{
    signal(SIGTERM, stop);
    signal(SIGINT, stop);
    for (;;)
        pause();
}
