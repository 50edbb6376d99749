/* SPDX-License-Identifier: Apache-2.0 */
/* observe.c - what the user sees while steps run, and the signals that interrupt. */
#include "install.h"

#include "common/memory.h"
#include "common/output.h"

#include <signal.h>

static struct {
    bool is_quiet, has_started;
    volatile sig_atomic_t signal;
    size_t position, n;
    char text[128], log[256];
} observed;

static void on_signal(int number)
{
    observed.signal = number;
}

void observe(bool quiet)
{
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};
    struct sigaction action = {.sa_handler = on_signal}, inherited;

    observed.is_quiet = quiet;
    for (size_t i = 0; i < COUNT(numbers); i++)
        /* Signals that nohup ignores stay ignored. */
        if (sigaction(numbers[i], NULL, &inherited) == 0 && (numbers[i] != SIGHUP || inherited.sa_handler != SIG_IGN))
            sigaction(numbers[i], &action, NULL);
}

int observed_signal(void)
{
    return observed.signal;
}

bool observe_is_interrupted(void)
{
    return observed.signal != 0;
}

void observe_line(const char *format, ...)
{
    char text[512];

    WITH_ARGS(args, format, vsnprintf(text, sizeof(text), format, args));
    progress_hide();
    if (observed.is_quiet)
        fprintf(stderr, "%s\n", text);
    else
        out_line("%s", text);
    fflush(stdout);
}

void observe_begin(const struct recipe *recipe, const struct recipe_step *step, enum install_phase phase,
                   const char *log)
{
    static const char *const phases[] = {"downloading", "applying", "undoing", "verifying"};

    if (!observed.has_started)
        progress_start("install");
    observed.has_started = true;
    observed.n = recipe->n_steps;
    for (observed.position = 0; observed.position + 1 < observed.n; observed.position++)
        if (&recipe->steps[recipe->order[observed.position]] == step)
            break;
    snprintf(observed.text, sizeof(observed.text), "%s %s", phases[phase], step->title);
    snprintf(observed.log, sizeof(observed.log), "%s", log);
    progress_update((long)observed.position, (long)observed.n, "%s", observed.text);
}

void observe_tick(int64_t seconds, int budget_s)
{
    progress_update((long)observed.position, (long)observed.n, "%s, %d of %d s, log %s", observed.text, (int)seconds,
                    budget_s, observed.log);
}
