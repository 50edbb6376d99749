/* SPDX-License-Identifier: Apache-2.0 */
#include "ending.h"

#include "file.h"
#include "output.h"

#include <epkit/types.h>
#include <jansson.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ERRORS_MAX 16

enum { NOT_EXPECTED, EXPECTED, REPORTED, LAST };

static const int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};
#define N_SIGNALS (sizeof(signals) / sizeof(signals[0]))

static struct {
    atomic_int state; /* LAST: a signal handler or another thread writes the document and ends the process */
    const char *command;
    pid_t owner; /* not the child processes, which inherit this struct */
    json_t *errors;
    char interrupted[N_SIGNALS][320]; /* whole documents: a handler must not allocate */
} ending;

static void on_signal(int number)
{
    int expected = EXPECTED;

    if (getpid() == ending.owner && atomic_compare_exchange_strong(&ending.state, &expected, LAST))
        for (size_t i = 0; i < N_SIGNALS; i++)
            if (signals[i] == number)
                (void)file_write_all(STDOUT_FILENO, ending.interrupted[i], strlen(ending.interrupted[i]));
    /* SA_RESETHAND has reset the handler: this ends the process, unless it is PID 1 of a container. */
    raise(number);
    _exit(128 + number);
}

static json_t *make_document(int code, const char *verdict)
{
    const char *first = json_string_value(json_object_get(json_array_get(ending.errors, 0), "what"));
    json_t *document = out_document(ending.command);
    char text[120];

    if (code > 128)
        snprintf(text, sizeof(text), "ended by signal %d (%s)", code - 128, strsignal(code - 128));
    else
        snprintf(text, sizeof(text), "ended with exit code %d", code);
    json_object_set_new(document, "verdict", out_text(verdict ? verdict : first ? first : text));
    json_object_set_new(document, "errors", ending.errors ? json_incref(ending.errors) : json_array());
    json_object_set_new(document, "exit_code", json_integer(code));
    return document;
}

void ending_expect(const char *command)
{
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = (int)(SA_RESETHAND | SA_NODEFER)}, before;

    ending.command = command;
    ending.owner = getpid();
    json_decref(ending.errors);
    ending.errors = NULL;
    for (size_t i = 0; i < N_SIGNALS; i++) {
        json_t *document = make_document(128 + signals[i], NULL);
        char *text = json_dumps(document, 0);

        snprintf(ending.interrupted[i], sizeof(ending.interrupted[i]), "%s\n", text ? text : "");
        free(text);
        json_decref(document);
    }
    atomic_store(&ending.state, EXPECTED);
    for (size_t i = 0; i < N_SIGNALS; i++) {
        /* Another signal must not end the process while this one writes. */
        sigemptyset(&action.sa_mask);
        for (size_t k = 0; k < N_SIGNALS; k++)
            if (k != i)
                sigaddset(&action.sa_mask, signals[k]);
        if (sigaction(signals[i], NULL, &before) == 0 && before.sa_handler != SIG_IGN)
            sigaction(signals[i], &action, NULL);
    }
}

/* Whether this process still has to write the document. Disables it. */
static bool claim(void)
{
    int state = EXPECTED;

    if (atomic_compare_exchange_strong(&ending.state, &state, REPORTED))
        return getpid() == ending.owner;
    while (state == LAST && getpid() == ending.owner)
        pause();
    return false;
}

void ending_dismiss(void)
{
    (void)claim();
}

static json_t *make_error(const char *what)
{
    return json_pack("{s:o, s:n, s:n, s:n}", "what", out_text(what), "where", "why", "hint");
}

void ending_add(const char *what)
{
    if (atomic_load(&ending.state) != EXPECTED || json_array_size(ending.errors) >= ERRORS_MAX)
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
    char *both = NULL;

    if (!error || atomic_load(&ending.state) != EXPECTED)
        return;
    if (before && asprintf(&both, "%s; %s", before, text) < 0)
        return;
    json_object_set_new(error, key, out_text(both ? both : text));
    free(both);
}

void ending_write(int code, const char *verdict)
{
    /* out_json() disables the document. */
    if (atomic_load(&ending.state) == EXPECTED && getpid() == ending.owner)
        (void)out_json(make_document(code, verdict));
}

void ending_write_late(int code, const char *what, const char *where, const char *why, const char *hint)
{
    int state = EXPECTED;
    json_t *document, *error;
    char *text;

    if (getpid() != ending.owner || !atomic_compare_exchange_strong(&ending.state, &state, LAST))
        return;
    error = make_error(what);
    json_object_set_new(error, "where", out_text(where));
    json_object_set_new(error, "why", out_text(why));
    json_object_set_new(error, "hint", out_text(hint));
    document = out_document(ending.command);
    json_object_set_new(document, "verdict", out_text(what));
    json_object_set_new(document, "errors", json_pack("[o]", error));
    json_object_set_new(document, "exit_code", json_integer(code));
    text = json_dumps(document, JSON_INDENT(2) | JSON_ENSURE_ASCII);
    if (text) {
        (void)file_write_all(STDOUT_FILENO, text, strlen(text));
        (void)file_write_all(STDOUT_FILENO, "\n", 1);
    }
}
