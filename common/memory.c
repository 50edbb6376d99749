/* SPDX-License-Identifier: Apache-2.0 */
#include "memory.h"

#include <jansson.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#define RESERVE_BYTES 65536 /* for the report */

static void *reserve;
static void (*report)(void);

/* One thread reports. Others wait for its _exit(), so that they do not cut its document. */
_Noreturn void memory_end(void)
{
    static atomic_int reporter;
    int none = 0, me = gettid();

    if (report && atomic_compare_exchange_strong(&reporter, &none, me)) {
        free(reserve);
        report();
    }
    while (report && none != 0 && none != me)
        pause();
    _exit(1);
}

void *memory_new(size_t n, size_t bytes)
{
    void *memory = calloc(n ? n : 1, bytes ? bytes : 1);

    return memory ? memory : (memory_end(), NULL);
}

void *memory_grow(void *memory, size_t bytes)
{
    void *grown = realloc(memory, bytes);

    return grown ? grown : (memory_end(), NULL);
}

char *memory_vprintf(const char *format, va_list args)
{
    char *text;

    return vasprintf(&text, format, args) < 0 ? (memory_end(), NULL) : text;
}

char *memory_printf(const char *format, ...)
{
    return WITH_ARGS(args, format, memory_vprintf(format, args));
}

FILE *memory_stream(char **ret_text, size_t *ret_bytes)
{
    FILE *stream = open_memstream(ret_text, ret_bytes);

    return stream ? stream : (memory_end(), NULL);
}

void memory_close(FILE *stream)
{
    if (fclose(stream) != 0)
        memory_end();
}

static void *allocate(size_t bytes)
{
    return memory_grow(NULL, bytes);
}

void memory_init(void (*report_end)(void))
{
    report = report_end;
    reserve = malloc(RESERVE_BYTES);
    json_set_alloc_funcs(allocate, free);
}
