/* SPDX-License-Identifier: Apache-2.0 */
/* keep.c - entries and memory of a root. The rules are in keep.h. */
#include "source/state.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BLOCK_BYTES 65536
#define ENTRY_BYTES 96 /* of jansson's for each value, about */

struct root_block {
    struct root_block *next;
    size_t used, bytes;
    max_align_t data[];
};

const char *const keep_kind_names[KEEP_KINDS] = {"files", "folders", "links",   "stats",
                                                 "lines", "elf",     "answers", "facts"};

static const char *const state_names[] = {
    [ROOT_OK] = "ok", [ROOT_ABSENT] = "absent", [ROOT_DENIED] = "denied", [ROOT_FAILED] = "failed"};

/* --- memory --- */

void *root_alloc(struct root *root, size_t bytes)
{
    struct root_block *block = root->blocks;
    void *memory;

    if (bytes > SIZE_MAX / 2)
        return NULL;
    bytes = (bytes + sizeof(max_align_t) - 1) / sizeof(max_align_t) * sizeof(max_align_t);
    if (!block || block->bytes - block->used < bytes) {
        size_t room = bytes > BLOCK_BYTES ? bytes : BLOCK_BYTES;

        block = calloc(1, sizeof(*block) + room);
        if (!block)
            return NULL;
        block->bytes = room;
        block->next = root->blocks;
        root->blocks = block;
    }
    memory = (char *)block->data + block->used;
    block->used += bytes;
    return memory;
}

const char *root_printf(struct root *root, const char *format, ...)
{
    va_list args, again;
    char *text = NULL;
    int n;

    va_start(args, format);
    va_copy(again, args);
    n = vsnprintf(NULL, 0, format, args);
    if (n >= 0)
        text = root_alloc(root, (size_t)n + 1);
    if (text)
        vsnprintf(text, (size_t)n + 1, format, again);
    va_end(again);
    va_end(args);
    return text ? text : "";
}

const char *keep_name(struct root *root, const char *text)
{
    void *at = json_object_iter_at(root->names, text);

    if (!at && json_object_set_new_nocheck(root->names, text, json_true()) == 0)
        at = json_object_iter_at(root->names, text);
    return at ? json_object_iter_key(at) : "";
}

void keep_now(struct root *root, const char *path)
{
    root->has_read = true;
    atomic_store(&root->now, path[0] ? keep_name(root, path) : "");
}

void keep_done(struct root *root)
{
    keep_now(root, "");
}

const char *root_now_reading(const struct root *root)
{
    return atomic_load(&root->now);
}

void *keep_derived(struct root *root, enum keep_kind kind, const char *key)
{
    return (void *)(intptr_t)json_integer_value(json_object_get(root->derived[kind], key));
}

void keep_set_derived(struct root *root, enum keep_kind kind, const char *key, void *derived)
{
    json_object_set_new_nocheck(root->derived[kind], key, json_integer((json_int_t)(intptr_t)derived));
}

/* --- paths --- */

const char *keep_plain_path(const char *path, char ret_path[PATH_MAX])
{
    size_t used = 0;

    if (path[0] != '/')
        return "not an absolute path";
    if (strlen(path) >= PATH_MAX)
        return "the path is too long";
    while (*path) {
        size_t bytes = strcspn(path + 1, "/");

        if (bytes > 0 && !(bytes == 1 && path[1] == '.')) {
            memcpy(ret_path + used, path, bytes + 1);
            used += bytes + 1;
        }
        path += bytes + 1;
    }
    if (used == 0)
        ret_path[used++] = '/';
    ret_path[used] = '\0';
    return NULL;
}

const char *keep_path(char ret_path[PATH_MAX], const char *format, va_list args)
{
    char path[PATH_MAX];
    int n = vsnprintf(path, sizeof(path), format, args);

    ret_path[0] = '\0';
    if (n < 0 || n >= PATH_MAX)
        return "the path is too long";
    return keep_plain_path(path, ret_path);
}

/* The entry of a question that cannot be asked; made once for each reason. */
static const json_t *refuse(struct root *root, const char *why)
{
    if (!json_object_get(root->refused, why))
        json_object_set_new(root->refused, why, keep_failure(ROOT_FAILED, why));
    return json_object_get(root->refused, why);
}

const json_t *keep_ask(struct root *root, enum keep_kind kind, keep_maker *make, char ret_path[PATH_MAX],
                       const char *format, va_list args)
{
    const char *why = keep_path(ret_path, format, args);
    const json_t *entry = why ? refuse(root, why) : keep_look_up(root, kind, ret_path);

    return entry ? entry : keep_put(root, kind, ret_path, make(root, ret_path));
}

/* --- entries --- */

json_t *keep_failure(enum root_state state, const char *why)
{
    json_t *entry = json_object();

    if (!entry || json_object_set_new_nocheck(entry, "state", json_string(state_names[state])) < 0 ||
        json_object_set_new_nocheck(entry, "why", json_stringn_nocheck(why, strlen(why))) < 0) {
        json_decref(entry);
        return NULL;
    }
    return entry;
}

json_t *keep_failure_errno(int error_number)
{
    const char *why = strerrordesc_np(error_number);

    switch (error_number) {
    case ENOENT:
    case ENOTDIR:
    case ESRCH: /* in /proc: the process has ended */
        return keep_failure(ROOT_ABSENT, why);
    case EACCES:
    case EPERM:
        return keep_failure(ROOT_DENIED, why);
    default:
        return keep_failure(ROOT_FAILED, why ? why : "unknown error");
    }
}

enum root_state keep_state(const json_t *entry, const char **ret_why)
{
    const char *name = json_string_value(json_object_get(entry, "state"));
    const char *why = json_string_value(json_object_get(entry, "why"));

    *ret_why = why ? why : "";
    if (!name)
        return ROOT_OK;
    for (int state = ROOT_ABSENT; state <= ROOT_FAILED; state++)
        if (strcmp(name, state_names[state]) == 0)
            return (enum root_state)state;
    return ROOT_UNASKED;
}

/* About how much memory a value takes. */
static size_t weight(const json_t *value)
{
    size_t bytes = ENTRY_BYTES, i;
    const char *key;
    json_t *item;

    switch (json_typeof(value)) {
    case JSON_STRING:
        return bytes + json_string_length(value);
    case JSON_ARRAY:
        json_array_foreach(value, i, item) bytes += weight(item);
        return bytes;
    case JSON_OBJECT:
        json_object_foreach((json_t *)value, key, item) bytes += strlen(key) + weight(item);
        return bytes;
    default:
        return bytes;
    }
}

const json_t *keep_look_up(struct root *root, enum keep_kind kind, const char *key)
{
    const json_t *entry = json_object_get(root->kept[kind], key);

    root->has_read = true;
    if (entry)
        return entry;
    if (root->is_full)
        return root->full;
    if (root->fd < 0 || (kind == KEEP_ANSWERS && !root->is_live))
        return root->unasked;
    return NULL;
}

const json_t *keep_put(struct root *root, enum keep_kind kind, const char *key, json_t *entry)
{
    size_t bytes = entry ? weight(entry) + strlen(key) : 0;

    /* Lack of memory is like a full root: from now on nothing new is known. */
    if (!entry || bytes > ROOT_KEPT_MAX - root->kept_bytes ||
        json_object_set_nocheck(root->kept[kind], key, entry) < 0) {
        json_decref(entry);
        root->is_full = true;
        return root->full;
    }
    root->kept_bytes += bytes;
    json_decref(entry);
    return entry;
}

struct root_text keep_text(const json_t *entry)
{
    struct root_text text = {.text = ""};

    text.state = keep_state(entry, &text.why);
    if (text.state == ROOT_OK) {
        text.text = json_string_value(entry);
        text.bytes = json_string_length(entry);
    }
    return text;
}

/* --- a root --- */

ep_status keep_new(const char *name, struct root **ret_root)
{
    struct root *root = calloc(1, sizeof(*root));
    bool complete;

    if (!root)
        return ep_fail(EP_E_MEMORY, "no memory to look at a machine");
    root->fd = -1;
    atomic_init(&root->now, "");
    root->name = strdup(name);
    root->given = json_object();
    root->lines = json_object();
    root->names = json_object();
    root->unasked = json_object();
    root->refused = json_object();
    root->full = keep_failure(ROOT_FAILED, "more than 64 MiB were read from this machine");
    complete = root->name && root->given && root->lines && root->names && root->unasked && root->refused &&
               root->full && json_object_set_new(root->unasked, "state", json_string("unasked")) == 0 &&
               json_object_set_new(root->unasked, "why", json_string("the snapshot does not say")) == 0;
    for (int kind = 0; kind < KEEP_KINDS; kind++) {
        root->kept[kind] = json_object();
        root->derived[kind] = json_object();
        complete = complete && root->kept[kind] && root->derived[kind];
    }
    if (!complete) {
        root_free(root);
        return ep_fail(EP_E_MEMORY, "no memory to look at a machine");
    }
    *ret_root = root;
    return EP_OK;
}

void root_free(struct root *root)
{
    if (!root)
        return;
    for (struct root_block *block = root->blocks, *next; block; block = next) {
        next = block->next;
        free(block);
    }
    for (int kind = 0; kind < KEEP_KINDS; kind++) {
        json_decref(root->kept[kind]);
        json_decref(root->derived[kind]);
    }
    json_decref(root->given);
    json_decref(root->lines);
    json_decref(root->names);
    json_decref(root->unasked);
    json_decref(root->refused);
    json_decref(root->full);
    if (root->fd >= 0)
        close(root->fd);
    free(root->name);
    free(root);
}
