/* SPDX-License-Identifier: Apache-2.0 */
#include "agent.h"

#include "base/clock.h"
#include "common/dir.h"
#include "common/inherited.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#define LOST_S 120 /* an agent sends a heartbeat every five seconds; another agent may take over */
#define COMM "epkit-follow"

/* Pods may share their processes: one that waits in this pod has this mount namespace. */
static bool is_follower(const char *pid, const char *pod)
{
    char path[300], text[64] = "";
    struct stat info;
    ssize_t n;
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%s/comm", pid);
    file = fopen(path, "re");
    if (!file)
        return false;
    if (!fgets(text, sizeof(text), file) || strcmp(text, COMM "\n") != 0 || fstat(fileno(file), &info) != 0 ||
        info.st_uid != geteuid())
        text[0] = '\0';
    fclose(file);
    snprintf(path, sizeof(path), "/proc/%s/ns/mnt", pid);
    n = *text ? readlink(path, text, sizeof(text) - 1) : -1;
    text[n > 0 ? n : 0] = '\0';
    return n > 0 && strcmp(text, pod) == 0;
}

bool follow_send(int code)
{
    char pod[64] = "";
    DIR *folder = opendir("/proc");
    struct dirent *item;
    bool is_told = false;

    if (readlink("/proc/self/ns/mnt", pod, sizeof(pod) - 1) < 0)
        pod[0] = '\0';
    while ((item = dir_next(&folder)))
        if (atoi(item->d_name) > 0 && is_follower(item->d_name, pod))
            is_told |= sigqueue((pid_t)atoi(item->d_name), SIGRTMIN, (union sigval){.sival_int = code}) == 0;
    return is_told;
}

/* Until an agent sends the code, or the reason why that is not awaited any more. */
static int await_code(const sigset_t *signals, int64_t begin_s, int64_t deadline_s, char *ret_why, size_t bytes)
{
    uint64_t began_ns = ep_now_ns(), heard_ns = 0;
    siginfo_t info;

    while (!*ret_why) {
        uint64_t now_ns;

        /* The kernel passes signals on from this user and root alone. */
        if (sigtimedwait(signals, &info, &(struct timespec){.tv_sec = 1}) == SIGRTMIN && info.si_code == SI_QUEUE) {
            heard_ns = ep_now_ns();
            if (info.si_value.sival_int != FOLLOW_ALIVE)
                return info.si_value.sival_int;
        }
        now_ns = ep_now_ns();
        if (!heard_ns && now_ns > began_ns + (uint64_t)begin_s * 1000000000u)
            snprintf(ret_why, bytes, "the first pod did not start the launch within %lld s", (long long)begin_s);
        else if (heard_ns && now_ns > heard_ns + LOST_S * UINT64_C(1000000000))
            snprintf(ret_why, bytes, "no message from the launch for %d s", LOST_S);
        else if (deadline_s && now_ns > began_ns + (uint64_t)(begin_s + deadline_s) * 1000000000u)
            snprintf(ret_why, bytes, "the launch did not end within %lld s", (long long)deadline_s);
    }
    return 1;
}

int follow_wait(int64_t begin_s, int64_t deadline_s, char *ret_why, size_t bytes)
{
    char name[16] = "";
    const sigset_t signals = SIGNALS(SIGRTMIN);
    int code;

    ret_why[0] = '\0';
    sigprocmask(SIG_BLOCK, &signals, NULL);
    prctl(PR_GET_NAME, name);
    prctl(PR_SET_NAME, COMM);
    code = await_code(&signals, begin_s, deadline_s, ret_why, bytes);
    /* The next launch has to wait for the process that follows it. */
    prctl(PR_SET_NAME, name);
    return code;
}
