/* SPDX-License-Identifier: Apache-2.0 */
/* Time, and the observable state of processes. */
#include "fault.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

uint64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void sleep_us(int us)
{
    struct timespec left = {.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000L};

    while (nanosleep(&left, &left) != 0 && errno == EINTR)
        ;
}

int count_entries(const char *directory)
{
    DIR *dir = opendir(directory);
    int n = 0;

    if (!dir)
        return -1;
    for (const struct dirent *entry = readdir(dir); entry; entry = readdir(dir))
        n += entry->d_name[0] != '.';
    closedir(dir);
    return n;
}

static void show_file(int pid, const char *thread, const char *name)
{
    char path[300], text[256] = "";
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/task/%s/%s", pid, thread, name);
    file = fopen(path, "r");
    if (!file)
        return;
    if (fgets(text, sizeof(text), file))
        text[strcspn(text, "\n")] = '\0';
    fprintf(stderr, " %s=%s", name, text);
    fclose(file);
}

void show_process(int pid, const char *what)
{
    char path[64];
    DIR *dir;

    snprintf(path, sizeof(path), "/proc/%d/task", pid);
    dir = opendir(path);
    for (const struct dirent *entry = dir ? readdir(dir) : NULL; entry; entry = readdir(dir)) {
        if (entry->d_name[0] == '.')
            continue;
        fprintf(stderr, "  %s: process %d thread %s:", what, pid, entry->d_name);
        show_file(pid, entry->d_name, "stat");
        show_file(pid, entry->d_name, "wchan");
        show_file(pid, entry->d_name, "syscall");
        fputc('\n', stderr);
    }
    if (dir)
        closedir(dir);
}
