/* SPDX-License-Identifier: Apache-2.0 */
#include "output.h"

#include "text.h"

#include "base/clock.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define QUIET_NS UINT64_C(1000000000)          /* before the first output */
#define TERMINAL_NS (UINT64_C(1000000000) / 6) /* between two updates of the line */
#define PLAIN_NS UINT64_C(5000000000)          /* between two plain lines */

static struct {
    bool active, terminal, shown;
    uint64_t start_ns, last_ns;
    long done, total;
    char label[32], text[256];
} progress;

void progress_start(const char *label)
{
    memset(&progress, 0, sizeof(progress));
    progress.active = true;
    progress.terminal = out_is_terminal(stderr);
    progress.start_ns = ep_now_ns();
    snprintf(progress.label, sizeof(progress.label), "%s", label);
}

void progress_stop(void)
{
    progress_hide();
    progress.active = false;
}

void progress_hide(void)
{
    if (!progress.shown)
        return;
    stream_control(stderr, "\r\033[K");
    progress.shown = false;
}

/* A line that wraps cannot be cleared by a carriage return. */
static void print_in_place(const char *count, unsigned long seconds)
{
    struct winsize window;
    size_t columns = ioctl(STDERR_FILENO, TIOCGWINSZ, &window) == 0 && window.ws_col > 0 ? window.ws_col : 80;
    char line[400];

    snprintf(line, columns < sizeof(line) ? columns : sizeof(line), "%.20s%s %lu s  %s", progress.label, count, seconds,
             progress.text);
    text_cut(line);
    stream_control(stderr, "\r\033[K");
    fputs(line, stderr);
}

static void show(uint64_t now)
{
    unsigned long seconds = (unsigned long)((now - progress.start_ns) / 1000000000u);
    char count[48] = "";

    if (progress.total > 0)
        snprintf(count, sizeof(count), " %ld/%ld", progress.done, progress.total);
    if (progress.terminal)
        print_in_place(count, seconds);
    else
        fprintf(stderr, "epkit: %s%s, %lu s%s%s\n", progress.label, count, seconds, *progress.text ? ": " : "",
                progress.text);
    fflush(stderr);
    progress.shown = progress.terminal;
    progress.last_ns = now;
}

void progress_tick(void)
{
    uint64_t now = ep_now_ns();
    uint64_t interval = progress.terminal ? TERMINAL_NS : PLAIN_NS;

    if (!progress.active || now - progress.start_ns < QUIET_NS)
        return;
    if (now - (progress.last_ns ? progress.last_ns : progress.start_ns) >= interval)
        show(now);
}

void progress_update(long done, long total, const char *format, ...)
{
    if (!progress.active)
        return;
    progress.done = done;
    progress.total = total;
    WITH_ARGS(args, format, vsnprintf(progress.text, sizeof(progress.text), format, args));
    progress_tick();
}
