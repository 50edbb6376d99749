/* SPDX-License-Identifier: Apache-2.0 */
/* How long the threads of a process were runnable but not scheduled. */
#include "fault.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>

/* 0: not known. */
static uint64_t thread_delay_ns(int pid, int tid)
{
    unsigned long long ran, delayed = 0;
    char path[64];
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/task/%d/schedstat", pid, tid);
    file = fopen(path, "r");
    if (!file)
        return 0;
    if (fscanf(file, "%llu %llu", &ran, &delayed) != 2)
        delayed = 0;
    fclose(file);
    return delayed;
}

/* Delay of one thread since the last sample. */
static uint64_t added_ns(struct delay *delay, int tid, uint64_t delayed_ns)
{
    uint64_t added;
    int i = 0;

    while (i < DELAY_THREADS - 1 && delay->thread[i].tid && delay->thread[i].tid != tid)
        i++;
    if (delay->thread[i].tid != tid) {
        delay->thread[i].tid = tid;
        delay->thread[i].delayed_ns = 0;
    }
    added = delayed_ns > delay->thread[i].delayed_ns ? delayed_ns - delay->thread[i].delayed_ns : 0;
    delay->thread[i].delayed_ns = delayed_ns;
    return added;
}

/* Threads wait concurrently: the longest wait of a sample counts. */
void delay_sample(struct delay *delay, int pid)
{
    unsigned at = ++delay->samples % (DELAY_SAMPLES + 1), before = (delay->samples - 1) % (DELAY_SAMPLES + 1);
    uint64_t oldest_ns = delay->samples > DELAY_SAMPLES ? delay->sum_ns[at] : 0, most_ns = 0, added;
    char path[64];
    DIR *dir;

    snprintf(path, sizeof(path), "/proc/%d/task", pid);
    dir = opendir(path);
    for (const struct dirent *entry = dir ? readdir(dir) : NULL; entry; entry = readdir(dir)) {
        if (entry->d_name[0] == '.')
            continue;
        added = added_ns(delay, atoi(entry->d_name), thread_delay_ns(pid, atoi(entry->d_name)));
        if (added > most_ns)
            most_ns = added;
    }
    if (dir)
        closedir(dir);
    delay->sum_ns[at] = delay->sum_ns[before] + most_ns;
    if (delay->sum_ns[at] - oldest_ns > delay->most_ns)
        delay->most_ns = delay->sum_ns[at] - oldest_ns;
}
