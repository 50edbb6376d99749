/* SPDX-License-Identifier: Apache-2.0 */
#include "output.h"

#include "dir.h"
#include "memory.h"

#include <jansson.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ERRORS_MAX 16

static struct {
    atomic_bool is_expected; /* another thread may write the document */
    const char *command;
    pid_t owner; /* not the child processes, which inherit this struct */
    json_t *errors;
} ending;

/* Consumes `errors`. */
static json_t *make_document(int code, const char *verdict, json_t *errors)
{
    const char *first = json_string_value(json_object_get(json_array_get(errors, 0), "what"));
    json_t *document = out_document(ending.command);
    char text[120];

    if (code > 128)
        snprintf(text, sizeof(text), "ended by signal %d (%s)", code - 128, strsignal(code - 128));
    else
        snprintf(text, sizeof(text), "ended with exit code %d", code);
    json_object_set_new(document, "verdict", out_text(verdict ? verdict : first ? first : text));
    json_object_set_new(document, "errors", errors ? errors : json_array());
    json_object_set_new(document, "exit_code", json_integer(code));
    return document;
}

void ending_expect(const char *command)
{
    ending.command = command;
    ending.owner = getpid();
    json_decref(ending.errors);
    ending.errors = NULL;
    atomic_store(&ending.is_expected, true);
}

void ending_dismiss(void)
{
    atomic_store(&ending.is_expected, false);
}

static json_t *make_error(const char *what)
{
    return json_pack("{s:o, s:n, s:n, s:n}", "what", out_text(what), "where", "why", "hint");
}

void ending_add(const char *what)
{
    if (!atomic_load(&ending.is_expected) || json_array_size(ending.errors) >= ERRORS_MAX)
        return;
    if (!ending.errors)
        ending.errors = json_array();
    json_array_append_new(ending.errors, make_error(what));
}

void ending_detail(const char *key, const char *text)
{
    size_t n = json_array_size(ending.errors);
    json_t *error = n ? json_array_get(ending.errors, n - 1) : NULL;
    const char *before = json_string_value(json_object_get(error, key));
    char *both;

    if (!error || !atomic_load(&ending.is_expected))
        return;
    both = memory_printf("%s%s%s", before ? before : "", before ? "; " : "", text);
    json_object_set_new(error, key, out_text(both));
    free(both);
}

void ending_write(int code, const char *verdict)
{
    /* out_json() disables the document. */
    if (atomic_load(&ending.is_expected) && getpid() == ending.owner)
        (void)out_json(make_document(code, verdict, json_incref(ending.errors)));
}

void ending_write_late(int code, const char *what, const char *where, const char *why, const char *hint)
{
    json_t *document, *error;
    char *text;

    if (getpid() != ending.owner || !atomic_exchange(&ending.is_expected, false))
        return;
    error = make_error(what);
    json_object_set_new(error, "where", out_text(where));
    json_object_set_new(error, "why", out_text(why));
    json_object_set_new(error, "hint", out_text(hint));
    document = make_document(code, what, json_pack("[o]", error));
    text = json_dumps(document, JSON_INDENT(2) | JSON_ENSURE_ASCII);
    if (text) {
        (void)write_all(STDOUT_FILENO, text, strlen(text));
        (void)write_all(STDOUT_FILENO, "\n", 1);
    }
}

void ending_write_memory(void)
{
    static const char what[] = "out of memory",
                      hint[] = "raise the limit (ulimit -v, that of the container), or free memory";

    dprintf(STDERR_FILENO, "epkit: error: %s\n       %s\n", what, hint);
    ending_write_late(1, what, "", "", hint);
}
