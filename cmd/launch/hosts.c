/* SPDX-License-Identifier: Apache-2.0 */
/* hosts.c - lists of hosts and hostfiles. */
#include "hosts.h"

#include "base/error.h"
#include "common/dir.h"
#include "common/memory.h"
#include "common/temporary.h"
#include "common/text.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#define SLOTS_MAX 4096
/* The lowest port on which an ssh server may be expected: that of ssh itself. */
#define LOWEST_PORT 22

void hosts_done(struct hosts *hosts)
{
    free(hosts->list);
    *hosts = (struct hosts){0};
}

const char *host_name(const struct host *host)
{
    const char *at = strrchr(host->target, '@');

    return at ? at + 1 : host->target;
}

/* Is it a valid target for ssh? A word that begins with '-' would be an option. */
static bool is_target(const char *text)
{
    const char *host = strrchr(text, '@');

    host = host ? host + 1 : text;
    return *text != '-' && *text != '@' && *host && *host != '-' &&
           strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-@:%") == strlen(text);
}

static bool is_port(const char *text)
{
    return *text && strlen(text) < 6 && strspn(text, "0123456789") == strlen(text) && atoi(text) > 0 &&
           atoi(text) < 65536;
}

/* Separates the port and removes brackets. */
static bool split_port(char *text, char *ret_port)
{
    char *open = strchr(text, '['), *close = strchr(text, ']'), *port = NULL;

    if (open && close && close > open) {
        /* Only IPv6 addresses are written in brackets. */
        if ((open > text && open[-1] != '@') || (close[1] && close[1] != ':') ||
            !memchr(open, ':', (size_t)(close - open)))
            return false;
        port = close[1] ? close + 2 : NULL;
        *close = '\0';
        memmove(open, open + 1, strlen(open + 1) + 1);
        /* A removed bracket preceded the port. */
        if (port && !is_port(port))
            return false;
    } else if ((port = strchr(text, ':')) && !strchr(port + 1, ':')) {
        *port++ = '\0';
        if (!is_port(port))
            return false;
    } else {
        port = NULL;
    }
    if (port)
        memcpy(ret_port, port, strlen(port) + 1);
    return true;
}

/*
 * "HOST", "USER@HOST:222", "[2001:db8::1]:222", "2001:db8::1". A number below 22, the port of ssh, is one of slots, as
 * MPICH and Horovod write it: "HOST:8".
 */
static ep_status host_parse(const char *word, struct host *ret_host)
{
    struct host host = {.port = ""};
    char text[sizeof(host.target)];

    text_clean(word, host.word, sizeof(host.word));
    if (snprintf(text, sizeof(text), "%s", word) < (int)sizeof(text) && split_port(text, host.port) &&
        is_target(text)) {
        memcpy(host.target, text, sizeof(text));
        if (*host.port && atoi(host.port) < LOWEST_PORT) {
            host.slots = atoi(host.port);
            host.port[0] = '\0';
        }
        *ret_host = host;
        return EP_OK;
    }
    return ep_fail(EP_E_ARG, "'%s' is not a host: [USER@]HOST[:PORT]", host.word);
}

/* DNS names: case, a trailing dot and the user do not make another host. */
static bool is_same_host(const struct host *a, const struct host *b)
{
    const char *left = host_name(a), *right = host_name(b);
    size_t n = strlen(left), m = strlen(right);

    n -= n > 1 && left[n - 1] == '.';
    m -= m > 1 && right[m - 1] == '.';
    return n == m && strncasecmp(left, right, n) == 0 && strcmp(a->port, b->port) == 0;
}

static int find(const struct hosts *hosts, const struct host *host)
{
    return FIRST_OF(i, hosts->n, is_same_host(&hosts->list[i], host));
}

static ep_status append(const struct host *host, struct hosts *hosts)
{
    if (hosts->n == HOSTS_MAX)
        return ep_fail(EP_E_ARG, "more than %d hosts", HOSTS_MAX);
    if (hosts->n == hosts->capacity) {
        hosts->capacity = hosts->capacity ? 2 * hosts->capacity : 64;
        hosts->list = memory_grow(hosts->list, (size_t)hosts->capacity * sizeof(*hosts->list));
    }
    hosts->list[hosts->n++] = *host;
    return EP_OK;
}

/* --- lists with ranges --- */

/* Finds the group "[...]" of a Slurm range in `text`; the brackets of an IPv6 address are not a group. */
static const char *find_group(const char *text, const char **ret_end)
{
    for (const char *open = strchr(text, '['); open; open = strchr(open + 1, '[')) {
        const char *close = strchr(open, ']');

        if (!close)
            return NULL;
        if (strspn(open + 1, "0123456789,-") == (size_t)(close - open - 1) && close > open + 1) {
            *ret_end = close;
            return open;
        }
    }
    return NULL;
}

static ep_status expand(const char *what, const char *word, struct hosts *hosts);

/* Expands one "07" or "01-12" of a group: a word for each number, with as many digits as the first has. */
static ep_status expand_range(const char *what, const char *head, const char *range, size_t length, const char *tail,
                              struct hosts *hosts)
{
    const char *dash = memchr(range, '-', length);
    size_t digits = dash ? (size_t)(dash - range) : length;
    size_t last_digits = dash ? length - digits - 1 : length;
    long first, last;
    char word[512];

    if (digits == 0 || digits > 9 || last_digits == 0 || last_digits > 9 ||
        (dash && memchr(dash + 1, '-', last_digits)))
        return ep_fail(EP_E_ARG, "%s: '%.*s' is not a range of numbers", what, (int)length, range);
    first = strtol(range, NULL, 10);
    last = dash ? strtol(dash + 1, NULL, 10) : first;
    if (last < first || last - first >= HOSTS_MAX)
        return ep_fail(EP_E_ARG, "%s: the range '%.*s' is empty or has more than %d hosts", what, (int)length, range,
                       HOSTS_MAX);
    for (long i = first; i <= last; i++) {
        struct text text = text_in(word, sizeof(word));

        /* A name that is cut is still too long for a host. */
        text_add(&text, "%s%0*ld%s", head, (int)digits, i, tail);
        EP_TRY(expand(what, word, hosts));
    }
    return EP_OK;
}

/* Expands a word without commas outside of brackets: the first group here, the rest by recursion. */
static ep_status expand(const char *what, const char *word, struct hosts *hosts)
{
    const char *close = NULL, *open = find_group(word, &close);
    struct host host;
    char head[512];

    if (!open) {
        if (host_parse(word, &host) != EP_OK)
            return ep_fail_prefix(EP_E_ARG, "%s: ", what);
        if (find(hosts, &host) >= 0)
            return ep_fail(EP_E_ARG, "%s: '%s' is listed twice", what, host.word);
        if (append(&host, hosts) != EP_OK)
            return ep_fail_prefix(EP_E_ARG, "%s: ", what);
        return EP_OK;
    }
    snprintf(head, sizeof(head), "%.*s", (int)(open - word), word);
    for (const char *at = open + 1; at < close;) {
        size_t length = strcspn(at, ",]");

        EP_TRY(expand_range(what, head, at, length, close + 1, hosts));
        at += length + 1;
    }
    return EP_OK;
}

ep_status hosts_add_list(const char *what, const char *list, struct hosts *hosts)
{
    char word[512];
    size_t n = 0;
    int depth = 0;
    bool is_after_comma = true;

    for (const char *at = list;; at++) {
        bool is_space = isspace((unsigned char)*at) != 0;

        if (*at && (depth > 0 || (*at != ',' && !is_space))) {
            depth += (*at == '[') - (*at == ']');
            if (n + 1 >= sizeof(word))
                return ep_fail(EP_E_ARG, "%s: a name is longer than %zu characters", what, sizeof(word) - 1);
            if (!is_space)
                word[n++] = *at;
            continue;
        }
        word[n] = '\0';
        if (depth != 0)
            return ep_fail(EP_E_ARG, "%s: a bracket is not closed", what);
        if (n == 0 && !is_space && is_after_comma)
            return ep_fail(EP_E_ARG, "%s: there is an empty name in the list", what);
        if (n > 0)
            EP_TRY(expand(what, word, hosts));
        /* Spaces and newlines also separate names: other commands print lists that way. */
        is_after_comma = *at == ',' || (is_space && n == 0 && is_after_comma);
        n = 0;
        if (!*at)
            return EP_OK;
    }
}

/* --- hostfiles --- */

/* Settings that a line gives for its host. */
struct settings {
    char *host, *user;
    int slots;
};

/* Is the word several hosts? */
static bool is_several(const char *word)
{
    const char *end;

    return strpbrk(word, ",;") || find_group(word, &end);
}

static ep_status add_line_host(const char *file, int number, const struct settings *line, enum hosts_format format,
                               struct hosts *hosts)
{
    char word[512];
    struct host host;
    int there;

    snprintf(word, sizeof(word), "%s%s%s", line->user ? line->user : "", line->user ? "@" : "", line->host);
    if (host_parse(word, &host) != EP_OK)
        return ep_fail(EP_E_ARG, "%s, line %d: %s%s", file, number, ep_last_error(),
                       is_several(word) ? "; a file has one host a line, --hosts takes lists and ranges" : "");
    if (line->slots)
        host.slots = line->slots;
    host.line = number;
    there = find(hosts, &host);
    if (there >= 0 && format == HOSTS_REPEATED) {
        hosts->list[there].slots++;
        return EP_OK;
    }
    if (there >= 0)
        return ep_fail(EP_E_ARG, "%s, line %d: '%s' is already in line %d; for several slots write slots=N once", file,
                       number, host.word, hosts->list[there].line);
    if (format == HOSTS_REPEATED)
        host.slots = 1;
    if (append(&host, hosts) != EP_OK)
        return ep_fail_prefix(EP_E_ARG, "%s, line %d: ", file, number);
    return EP_OK;
}

static bool is_one_of(const char *word, const char *const *names)
{
    size_t length = strcspn(word, "=");

    for (; *names; names++)
        if (strlen(*names) == length && strncasecmp(word, *names, length) == 0)
            return true;
    return false;
}

/*
 * Parses a setting of Open MPI after the host. Only slots and user have a meaning here. An unknown setting is taken for
 * a typing error.
 */
static ep_status parse_setting(const char *file, int number, char *word, struct settings *line)
{
    char *value = strchr(word, '='), clean[128];

    text_clean(word, clean, sizeof(clean));
    if (!value)
        return ep_fail(EP_E_ARG, "%s, line %d: '%s' after the host is not a setting like slots=8", file, number, clean);
    value++;
    if (is_one_of(word, TEXTS("slots", "slot", "cpus", "cpu", "count"))) {
        line->slots = atoi(value);
        if (strspn(value, "0123456789") != strlen(value) || strlen(value) > 6 || line->slots < 1 ||
            line->slots > SLOTS_MAX)
            return ep_fail(EP_E_ARG, "%s, line %d: slots= takes a number from 1 to %d", file, number, SLOTS_MAX);
    } else if (is_one_of(word, TEXTS("user", "username", "user_name", "user-name"))) {
        line->user = value;
    } else if (!is_one_of(word, TEXTS("max_slots", "max-slots", "slots_max", "slots-max", "cpus_max", "cpus-max",
                                      "cpu_max", "cpu-max", "max_cpus", "max-cpus", "count_max", "count-max", "boards",
                                      "board", "sockets", "socket", "cores", "core", "sockets_per_board",
                                      "cores_per_socket", "sched", "slot_list", "binding", "ifhn", "rank"))) {
        return ep_fail(EP_E_ARG, "%s, line %d: '%s' after the host is not a setting of Open MPI like slots=8", file,
                       number, clean);
    }
    return EP_OK;
}

static ep_status add_line(const char *file, int number, char *text, enum hosts_format format, struct hosts *hosts)
{
    char *rest = text, *word;
    struct settings line = {0};

    /*
     * Editors of other systems write a byte order mark at the beginning and a carriage return at the end of each line.
     */
    if (number == 1 && strncmp(text, "\xef\xbb\xbf", 3) == 0)
        rest += 3;
    rest[strcspn(rest, "#\n")] = '\0';
    if (*rest && rest[strlen(rest) - 1] == '\r')
        rest[strlen(rest) - 1] = '\0';
    if (strchr(rest, '\r'))
        return ep_fail(EP_E_ARG, "%s, line %d: a carriage return within the line: write each host on its own line",
                       file, number);
    while ((word = strsep(&rest, " \t"))) {
        if (*word && !line.host)
            line.host = word;
        else if (*word)
            EP_TRY(parse_setting(file, number, word, &line));
    }
    return line.host ? add_line_host(file, number, &line, format, hosts) : EP_OK;
}

/* Opens a regular file. NULL after ep_fail(): a device or FIFO may be endless. */
static FILE *hosts_open(const char *file)
{
    FILE *stream = file_open_regular(file);

    if (!stream)
        ep_fail(EP_E_ARG, "%s: %s", file, errno == EINVAL ? "not a regular file" : strerror(errno));
    return stream;
}

ep_status hosts_add_file(const char *file, enum hosts_format format, struct hosts *hosts)
{
    FILE *stream = hosts_open(file);
    ep_status status = stream ? EP_OK : EP_E_ARG;
    int before = hosts->n;
    char *line = NULL;
    size_t room = 0;
    ssize_t bytes;

    for (int number = 1; status == EP_OK && (bytes = getline(&line, &room, stream)) >= 0; number++) {
        if (strlen(line) != (size_t)bytes)
            status = ep_fail(EP_E_ARG, "%s, line %d: contains a NUL byte, so it is not text", file, number);
        else
            status = add_line(file, number, line, format, hosts);
    }
    if (status == EP_OK && ferror(stream))
        status = ep_fail(EP_E_ARG, "%s: %s", file, strerror(errno));
    free(line);
    if (stream)
        fclose(stream);
    if (status == EP_OK && hosts->n == before)
        return ep_fail(EP_E_ARG, "%s: the file contains no host", file);
    return status;
}

/* --- writing --- */

ep_status hosts_write(const char *path, const struct hosts *hosts, int slots)
{
    char *text;
    size_t bytes;
    FILE *stream = memory_stream(&text, &bytes);
    int number;

    for (int i = 0; i < hosts->n; i++) {
        if (slots)
            fprintf(stream, "%s slots=%d\n", host_name(&hosts->list[i]), slots);
        else
            fprintf(stream, "%s\n", host_name(&hosts->list[i]));
    }
    memory_close(stream);
    number = temporary_save(path, text, bytes, 0644);
    free(text);
    return number ? ep_fail(EP_E_SYSTEM, "writing the hostfile %s: %s", path, write_reason(number)) : EP_OK;
}
