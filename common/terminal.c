/* SPDX-License-Identifier: Apache-2.0 */
#include "output.h"

#include "inherited.h"
#include "memory.h"

#include "temporary.h"
#include "text.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TICK_MS 200
#define TEXT_BYTES 4096

struct filter {
    FILE *stream;
    int fd;
    int error;       /* errno of the first write that failed */
    char pending[4]; /* first bytes of a character whose rest is in the next write */
    size_t n_pending;
};

enum { OUTPUT, ERROR, N_FILTERS };

static struct filter filters[N_FILTERS] = {{.fd = STDOUT_FILENO}, {.fd = STDERR_FILENO}};

static struct filter *filter_of(FILE *stream)
{
    for (size_t i = 0; i < N_FILTERS; i++)
        if (filters[i].stream && filters[i].stream == stream)
            return &filters[i];
    return NULL;
}

/*
 * A stalled reader must not keep a signal from ending the command. A pipe that polls as writable accepts PIPE_BUF bytes
 * without blocking. This also handles a stream that another process has set to O_NONBLOCK.
 */
static int terminal_write(int fd, const char *text, size_t bytes)
{
    while (bytes > 0) {
        struct pollfd output = {.fd = fd, .events = POLLOUT};
        ssize_t n;

        if (poll(&output, 1, TICK_MS) == 0) {
            if (temporary_is_interrupted())
                return EINTR;
            continue;
        }
        n = write(fd, text, bytes < PIPE_BUF ? bytes : PIPE_BUF);
        /* A closed standard error is no error: messages may be unwanted. A closed standard output loses data. */
        if (n < 0 && errno == EBADF && fd == STDERR_FILENO)
            return 0;
        if (n < 0 && errno != EINTR && errno != EAGAIN)
            return errno;
        text += n > 0 ? n : 0;
        bytes -= n > 0 ? (size_t)n : 0;
    }
    return 0;
}

static int put(struct filter *filter, const char *text, size_t bytes)
{
    if (!filter->error)
        filter->error = terminal_write(filter->fd, text, bytes);
    if (filter->error == EPIPE && filter->fd == STDOUT_FILENO)
        inherited_broken_pipe();
    errno = filter->error;
    return filter->error ? -1 : 0;
}

static ssize_t filter_write(void *context, const char *text, size_t bytes)
{
    struct filter *filter = context;
    char shown[TEXT_BYTES], head[8];
    size_t used = 0, at = 0;

    memcpy(head, filter->pending, filter->n_pending);
    while (at < bytes) {
        const char *piece;
        size_t piece_bytes, n, kept = filter->n_pending;

        if (kept) {
            /* Byte by byte, until it is a character or invalid. */
            head[kept] = text[at];
            n = text_printable(head, kept + 1, &piece, &piece_bytes);
            if (n == 0) {
                filter->pending[filter->n_pending++] = text[at++];
                continue;
            }
            /* If the pending bytes are invalid, the byte at `at` may begin a character. */
            at += n > kept;
            filter->n_pending = 0;
        } else {
            n = text_printable(text + at, bytes - at, &piece, &piece_bytes);
            if (n == 0) {
                filter->n_pending = bytes - at;
                memcpy(filter->pending, text + at, filter->n_pending);
                memcpy(head, filter->pending, filter->n_pending);
                break;
            }
            at += n;
        }
        if (used + piece_bytes > sizeof(shown)) {
            if (put(filter, shown, used) != 0)
                return 0;
            used = 0;
        }
        memcpy(shown + used, piece, piece_bytes);
        used += piece_bytes;
    }
    return put(filter, shown, used) == 0 ? (ssize_t)bytes : 0;
}

int stream_open(void)
{
    static const cookie_io_functions_t functions = {.write = filter_write};

    for (size_t i = OUTPUT; i <= ERROR; i++) {
        filters[i].stream = fopencookie(&filters[i], "w", functions);
        if (!filters[i].stream)
            return -1;
    }
    /* Line-buffered: each message is one write without delay. */
    setvbuf(filters[OUTPUT].stream, NULL, isatty(STDOUT_FILENO) ? _IOLBF : _IOFBF, BUFSIZ);
    setvbuf(filters[ERROR].stream, NULL, _IOLBF, BUFSIZ);
    stdout = filters[OUTPUT].stream;
    stderr = filters[ERROR].stream;
    return 0;
}

void stream_control(FILE *stream, const char *sequence)
{
    struct filter *filter = filter_of(stream);

    if (!*sequence)
        return;
    if (!filter) {
        fputs(sequence, stream);
        return;
    }
    if (fflush(stream) == 0)
        put(filter, sequence, strlen(sequence));
}

int stream_error(FILE *stream)
{
    const struct filter *filter = filter_of(stream);

    if (filter)
        return filter->error;
    return ferror(stream) ? EIO : 0;
}

/* --- JSON --- */

/* Characters that the filter would replace; jansson's output is valid UTF-8, and has newlines only between strings. */
static bool has_hidden(const char *text)
{
    size_t left = strlen(text), n;
    uint32_t code;

    for (; left; text += n, left -= n) {
        code = 0;
        n = text_decode(text, left, &code);
        if (n == 0 || n == TEXT_INCOMPLETE || (!text_is_printable(code) && code != '\n'))
            return true;
    }
    return false;
}

char *stream_json_text(const json_t *document, size_t flags)
{
    char *text = json_dumps(document, flags), *shown = NULL;
    size_t bytes;
    FILE *out;

    if (!text || !has_hidden(text))
        return text;
    free(text);
    text = json_dumps(document, flags | JSON_ENSURE_ASCII);
    /* That leaves DEL. */
    out = memory_stream(&shown, &bytes);
    for (const char *at = text; *at; at++)
        *at == 0x7f ? fputs("\\u007f", out) : putc_unlocked(*at, out);
    free(text);
    memory_close(out);
    return shown;
}

int stream_json(FILE *stream, const json_t *document, size_t flags)
{
    char *text = stream_json_text(document, flags);
    sigset_t ending = SIGNALS(SIGTERM, SIGINT, SIGHUP, SIGQUIT), before;
    int result;

    /* A signal that ends the command does so before or after the document. */
    pthread_sigmask(SIG_BLOCK, &ending, &before);
    result = fputs(text, stream) >= 0 && fputc('\n', stream) != EOF && fflush(stream) == 0 ? 0 : -1;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    free(text);
    return result;
}
