/* SPDX-License-Identifier: Apache-2.0 */
/*
 * report_plot.c - plots, drawn by gnuplot and put into the page as they are.
 *
 * Colours of lines and text are left to the page's style where gnuplot allows it, so that a plot can be read on a dark
 * page. Data goes to gnuplot as numbers and names of our own, never text from outside.
 */
#include "report.h"

#include "bench/bench.h"

#include "inherited.h"
#include "progress.h"

#include "base/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define GNUPLOT_MS 20000 /* for all plots together */
#define KILL_GRACE_MS 2000
#define MAX_SVG_BYTES (4 << 20)

static const char *text_of(const json_t *row, const char *key)
{
    const char *text = json_string_value(json_object_get(row, key));

    return text ? text : "";
}

static double number_of(const json_t *row, const char *key)
{
    return json_number_value(json_object_get(row, key));
}

static bool has_rate(const json_t *row)
{
    return json_is_number(json_object_get(row, "logical_gbps")) &&
           json_is_object(json_object_get(row, bench_yardstick_of(row).key));
}

/* --- gnuplot --- */

/* A process that has closed its output may still not end. */
static bool wait_for(pid_t pid, uint64_t deadline_ns, int *ret_status)
{
    const struct timespec tick = {.tv_nsec = 5000000};
    bool is_killed = false;
    pid_t ended;

    while ((ended = waitpid(pid, ret_status, WNOHANG)) == 0 || (ended < 0 && errno == EINTR)) {
        if (ep_now_ns() >= deadline_ns && is_killed)
            return false;
        if (ep_now_ns() >= deadline_ns) {
            kill(pid, SIGKILL);
            is_killed = true;
            deadline_ns = ep_deadline_ns(KILL_GRACE_MS);
        }
        nanosleep(&tick, NULL);
    }
    return ended == pid;
}

static char *read_svg(int fd, pid_t pid, uint64_t deadline_ns)
{
    char *text = malloc(MAX_SVG_BYTES + 1);
    size_t used = 0;
    int status = 0;

    while (text && used < MAX_SVG_BYTES && ep_now_ns() < deadline_ns) {
        struct pollfd wait = {fd, POLLIN, 0};
        ssize_t n = 0;

        progress_tick();
        if (poll(&wait, 1, 100) <= 0)
            continue;
        n = read(fd, text + used, MAX_SVG_BYTES - used);
        if (n == 0 || (n < 0 && errno != EINTR))
            break;
        used += n > 0 ? (size_t)n : 0;
    }
    if (used == MAX_SVG_BYTES)
        kill(pid, SIGKILL);
    if (!wait_for(pid, deadline_ns, &status) || !WIFEXITED(status) || WEXITSTATUS(status) != 0 || used == 0) {
        free(text);
        return NULL;
    }
    text[used] = '\0';
    return text;
}

/*
 * The first things the child does. It ends with this process, whatever ends that; and it does as it is told here: -d
 * keeps the user's own settings out of the plots.
 */
static void become_gnuplot(pid_t parent, int input_fd, int output_fd)
{
    int null_fd = open("/dev/null", O_WRONLY);

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(127);
    inherited_restore();
    dup2(input_fd, STDIN_FILENO);
    lseek(STDIN_FILENO, 0, SEEK_SET);
    dup2(output_fd, STDOUT_FILENO);
    dup2(null_fd, STDERR_FILENO);
    execlp("gnuplot", "gnuplot", "-d", "-", (char *)NULL);
    _exit(127);
}

/* Runs gnuplot with `script` in a file as its standard input. What it writes; NULL on any failure. */
static char *run_gnuplot(const char *script, size_t bytes, uint64_t deadline_ns)
{
    FILE *input = tmpfile();
    pid_t parent = getpid();
    char *svg = NULL;
    int fds[2];
    pid_t pid;

    if (!input || fwrite(script, 1, bytes, input) != bytes || fflush(input) != 0 || pipe2(fds, O_CLOEXEC) != 0)
        goto close;
    rewind(input);
    pid = fork();
    if (pid == 0)
        become_gnuplot(parent, fileno(input), fds[1]);
    close(fds[1]);
    if (pid > 0)
        svg = read_svg(fds[0], pid, deadline_ns);
    close(fds[0]);
close:
    if (input)
        fclose(input);
    return svg;
}

static bool starts(const char *at, const char *text)
{
    return strncmp(at, text, strlen(text)) == 0;
}

/*
 * Prints the <svg> element: without the XML declaration, and with names that are its own, because several plots share
 * one page.
 */
static void print_svg(FILE *stream, const char *svg, int number, const char *label)
{
    const char *at = strstr(svg, "<svg");

    if (!at)
        return;
    fprintf(stream, "<svg role=\"img\" aria-label=\"%s\"", label);
    for (at += strlen("<svg"); *at; at++) {
        fputc(*at, stream);
        if (starts(at, "'gp") || starts(at, "'#gp") || starts(at, "\"gnuplot_") || starts(at, "'textbox'") ||
            starts(at, "'greybox'")) {
            if (at[1] == '#')
                fputc(*++at, stream);
            fprintf(stream, "p%d", number);
        }
    }
}

static void begin_script(FILE *script, const char *x_label, const char *y_label)
{
    fprintf(script,
            "set terminal svg size 760,340 dynamic font 'sans-serif,13'\n"
            "set border 3 lw 1\nset tics nomirror\nset grid ytics lt 1 lw 0.5 lc rgb '#c0c0c0'\n"
            "set key outside top right horizontal\nset xlabel \"%s\"\nset ylabel \"%s\"\nset yrange [0:*]\n"
            "set bmargin 4\n",
            x_label, y_label);
}

/* --- the plots --- */

struct plot {
    const char *title, *label;
    /* Writes a script; false if the rows do not hold enough for this plot. */
    bool (*script)(FILE *script, const json_t *rows);
};

/* Of each operation and type the measurement with the most tokens. */
static bool is_largest(const json_t *rows, const json_t *row)
{
    json_t *other;
    size_t i;

    json_array_foreach(rows, i, other)
    {
        if (strcmp(text_of(other, "op"), text_of(row, "op")) == 0 &&
            strcmp(text_of(other, "type"), text_of(row, "type")) == 0 &&
            number_of(other, "tokens") > number_of(row, "tokens"))
            return false;
    }
    return true;
}

static bool script_rates(FILE *script, const json_t *rows)
{
    json_t *row;
    size_t i;
    const char *yardstick = bench_yardstick_of(json_array_get(rows, 0)).name;
    int n = 0;

    begin_script(script, "operation", "GB/s of one rank");
    fputs("set style data histograms\nset style histogram clustered gap 1.5\nset style fill solid 0.9 noborder\n"
          "$d << EOD\n",
          script);
    json_array_foreach(rows, i, row)
    {
        if (!has_rate(row) || !is_largest(rows, row))
            continue;
        fprintf(script, "\"%s %s\" %.6g %.6g\n", text_of(row, "op"), text_of(row, "type"),
                number_of(row, "logical_gbps"), number_of(json_object_get(row, bench_yardstick_of(row).key), "gbps"));
        n++;
    }
    fprintf(script,
            "EOD\nplot $d using 2:xtic(1) title 'epkit' lc rgb '#2f6fb0', '' using 3 title '%s, same bytes' lc "
            "rgb '#a8b0b8'\n",
            yardstick);
    return n > 0;
}

static int count_tokens(FILE *script, const json_t *rows, const char *op)
{
    json_t *row;
    size_t i;
    int n = 0;

    json_array_foreach(rows, i, row)
    {
        if (!has_rate(row) || strcmp(text_of(row, "op"), op) != 0 || strcmp(text_of(row, "type"), "bf16") != 0)
            continue;
        fprintf(script, "%.0f %.6g\n", number_of(row, "tokens"),
                number_of(json_object_get(row, bench_yardstick_of(row).key), "time_us") / number_of(row, "time_us"));
        n++;
    }
    return n;
}

static bool script_tokens(FILE *script, const json_t *rows)
{
    int n_dispatch, n_combine;

    begin_script(script, "tokens of each rank", "times the yardstick");
    fputs("set logscale x 2\nset xrange [*:*]\nset offsets graph 0.05, graph 0.05, graph 0.05, 0\n$dispatch << EOD\n",
          script);
    n_dispatch = count_tokens(script, rows, "dispatch");
    fputs("EOD\n$combine << EOD\n", script);
    n_combine = count_tokens(script, rows, "combine");
    fputs("EOD\nplot $dispatch using 1:2 with linespoints lw 2 pt 7 ps 0.8 lc rgb '#2f6fb0' title 'dispatch bf16', "
          "$combine using 1:2 with linespoints lw 2 pt 5 ps 0.7 lc rgb '#c0603a' title 'combine bf16'\n",
          script);
    return n_dispatch > 1 && n_combine > 1;
}

static bool script_phases(FILE *script, const json_t *rows)
{
    json_t *row;
    size_t i;
    int n = 0;

    begin_script(script, "operation", "milliseconds");
    fputs("set style data histograms\nset style histogram rowstacked\nset style fill solid 0.9 noborder\n"
          "set boxwidth 0.6\n$d << EOD\n",
          script);
    json_array_foreach(rows, i, row)
    {
        const json_t *phases = json_object_get(row, "phases_us");

        if (!json_is_object(phases) || !is_largest(rows, row))
            continue;
        fprintf(script, "\"%s %s\" %.6g %.6g %.6g %.6g\n", text_of(row, "op"), text_of(row, "type"),
                number_of(phases, "wait_ready") / 1e3, number_of(phases, "move") / 1e3,
                number_of(phases, "wait_done") / 1e3, number_of(phases, "copy") / 1e3);
        n++;
    }
    fputs(
        "EOD\nplot $d using 2:xtic(1) title 'waiting for buffers' lc rgb '#d8b25c', '' using 3 title 'moving rows' lc "
        "rgb '#2f6fb0', '' using 4 title 'waiting for peers' lc rgb '#c0603a', '' using 5 title 'local copies' lc rgb "
        "'#a8b0b8'\n",
        script);
    return n > 0;
}

static const struct plot plots[] = {
    {"Rate of one rank beside a plain copy, largest batch", "bars: GB/s of each operation beside a copy", script_rates},
    {"Beside a plain copy, by batch size", "lines: rate in multiples of a copy over tokens of each rank",
     script_tokens},
    {"Where the time goes, largest batch", "stacked bars: milliseconds of each phase of an operation", script_phases},
};

int report_plots(FILE *stream, const json_t *rows, const char **ret_why)
{
    uint64_t deadline_ns = ep_deadline_ns(GNUPLOT_MS);
    int n = 0;

    *ret_why = NULL;
    for (size_t i = 0; i < sizeof(plots) / sizeof(plots[0]) && !*ret_why; i++) {
        char *text = NULL, *svg;
        size_t bytes = 0;
        FILE *script = open_memstream(&text, &bytes);
        bool wanted = script && plots[i].script(script, rows);

        if (script)
            fclose(script);
        progress_update(0, 0, "drawing plot %zu", i + 1);
        svg = wanted ? run_gnuplot(text, bytes, deadline_ns) : NULL;
        free(text);
        if (svg) {
            fprintf(stream, "<figure>\n<figcaption>%s</figcaption>\n", plots[i].title);
            print_svg(stream, svg, (int)i + 1, plots[i].label);
            fputs("</figure>\n", stream);
            n++;
        } else if (wanted) {
            *ret_why = "gnuplot was not found or failed, so plots are missing: the tables hold all figures";
        }
        free(svg);
    }
    return n;
}
