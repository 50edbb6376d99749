/* SPDX-License-Identifier: Apache-2.0 */
/* cache.c - the cache and the memory of a source. cache.h has the rules. */
#include "common/memory.h"
#include "state.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK_BYTES 65536
#define ENTRY_BYTES 96 /* of jansson for each value, approximately */

struct source_block {
    struct source_block *next;
    size_t used, bytes;
    max_align_t data[];
};

const char *const cache_kind_names[CACHE_KINDS] = {"files", "folders", "links",   "stats",
                                                   "lines", "elf",     "answers", "facts"};

static const char *const state_names[] = {
    [SOURCE_OK] = "ok", [SOURCE_ABSENT] = "absent", [SOURCE_DENIED] = "denied", [SOURCE_FAILED] = "failed"};

/* --- memory --- */

void *source_alloc(struct source *source, size_t bytes)
{
    struct source_block *block = source->blocks;
    void *memory;

    bytes = (bytes + sizeof(max_align_t) - 1) / sizeof(max_align_t) * sizeof(max_align_t);
    if (!block || block->bytes - block->used < bytes) {
        size_t room = bytes > BLOCK_BYTES ? bytes : BLOCK_BYTES;

        block = memory_new(1, sizeof(*block) + room);
        block->bytes = room;
        block->next = source->blocks;
        source->blocks = block;
    }
    memory = (char *)block->data + block->used;
    block->used += bytes;
    return memory;
}

const char *source_printf(struct source *source, const char *format, ...)
{
    va_list args, again;
    char *text;
    int n;

    va_start(args, format);
    va_copy(again, args);
    n = vsnprintf(NULL, 0, format, args);
    text = source_alloc(source, (size_t)(n > 0 ? n : 0) + 1);
    vsnprintf(text, (size_t)(n > 0 ? n : 0) + 1, format, again);
    va_end(again);
    va_end(args);
    return text;
}

/* Interns `text`: equal texts have the same address. */
static const char *cache_intern(struct source *source, const char *text)
{
    if (!json_object_get(source->names, text))
        json_object_set_new_nocheck(source->names, text, json_true());
    return json_object_iter_key(json_object_iter_at(source->names, text));
}

void source_set_current_path(struct source *source, const char *path)
{
    source->has_read = true;
    atomic_store(&source->current_path, path[0] ? cache_intern(source, path) : "");
}

void live_done(struct source *source)
{
    source_set_current_path(source, "");
}

const char *source_current_path(const struct source *source)
{
    return atomic_load(&source->current_path);
}

void *cache_memo(struct source *source, enum cache_kind kind, const char *key)
{
    return (void *)(intptr_t)json_integer_value(json_object_get(source->memos[kind], key));
}

void cache_set_memo(struct source *source, enum cache_kind kind, const char *key, void *memo)
{
    json_object_set_new_nocheck(source->memos[kind], key, json_integer((json_int_t)(intptr_t)memo));
}

/* --- paths --- */

#define TOO_LONG "the path is too long"
#define RELATIVE "not an absolute path"

const char *cache_plain_path(const char *path, char ret_path[PATH_MAX])
{
    size_t used = 0;

    if (path[0] != '/')
        return RELATIVE;
    if (strlen(path) >= PATH_MAX)
        return TOO_LONG;
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

struct source *source_path(struct source *source, const char *format, ...)
{
    char path[PATH_MAX];
    int n = WITH_ARGS(args, format, vsnprintf(path, sizeof(path), format, args));

    source->path[0] = '\0';
    source->path_why = n < 0 || n >= PATH_MAX ? TOO_LONG : cache_plain_path(path, source->path);
    return source;
}

const json_t *cache_query(struct source *source, enum cache_kind kind, cache_maker *make)
{
    const json_t *entry = cache_get(source, kind, source->path);

    if (source->path_why)
        return json_object_get(source->refused, source->path_why);
    return entry ? entry : cache_put(source, kind, source->path, make(source, source->path));
}

/* --- entries --- */

json_t *cache_failure(enum source_state state, const char *why)
{
    json_t *entry = json_pack("{s:s}", "state", state_names[state]);

    json_object_set_new_nocheck(entry, "why", json_stringn_nocheck(why, strlen(why)));
    return entry;
}

json_t *cache_failure_errno(int error_number)
{
    const char *why = strerrordesc_np(error_number);

    switch (error_number) {
    case ENOENT:
    case ENOTDIR:
    case ESRCH: /* in /proc: the process has ended */
        return cache_failure(SOURCE_ABSENT, why);
    case EACCES:
    case EPERM:
        return cache_failure(SOURCE_DENIED, why);
    default:
        return cache_failure(SOURCE_FAILED, why ? why : "unknown error");
    }
}

enum source_state cache_state(const json_t *entry, const char **ret_why)
{
    const char *name = json_string_value(json_object_get(entry, "state"));
    const char *why = json_string_value(json_object_get(entry, "why"));

    *ret_why = why ? why : "";
    if (!name)
        return SOURCE_OK;
    for (int state = SOURCE_ABSENT; state <= SOURCE_FAILED; state++)
        if (strcmp(name, state_names[state]) == 0)
            return (enum source_state)state;
    return SOURCE_NOT_RECORDED;
}

/* The approximate memory of a value. */
static size_t entry_weight(const json_t *value)
{
    size_t bytes = ENTRY_BYTES;

    switch (json_typeof(value)) {
    case JSON_STRING:
        return bytes + json_string_length(value);
    case JSON_ARRAY:
        FOR_JSON (item, value)
            bytes += entry_weight(item);
        return bytes;
    case JSON_OBJECT:
        FOR_MEMBERS (key, item, value)
            bytes += strlen(key) + entry_weight(item);
        return bytes;
    default:
        return bytes;
    }
}

const json_t *cache_get(struct source *source, enum cache_kind kind, const char *key)
{
    const json_t *entry = json_object_get(source->cached[kind], key);

    source->has_read = true;
    if (entry)
        return entry;
    if (source->is_full)
        return source->full;
    if (source->fd < 0 || (kind == CACHE_ANSWERS && !source->is_live))
        return source->not_recorded;
    return NULL;
}

const json_t *cache_put(struct source *source, enum cache_kind kind, const char *key, json_t *entry)
{
    size_t bytes = entry_weight(entry) + strlen(key);

    if (bytes > SOURCE_CACHE_MAX - source->cached_bytes) {
        json_decref(entry);
        source->is_full = true;
        return source->full;
    }
    source->cached_bytes += bytes;
    json_object_set_new_nocheck(source->cached[kind], key, entry);
    return entry;
}

struct source_text cache_text(const json_t *entry)
{
    struct source_text text = {.text = ""};

    text.state = cache_state(entry, &text.why);
    if (text.state == SOURCE_OK) {
        text.text = json_string_value(entry);
        text.bytes = json_string_length(entry);
    }
    return text;
}

/* --- a source --- */

struct source *source_new(const char *name)
{
    struct source *source = memory_new(1, sizeof(*source));

    source->fd = -1;
    atomic_init(&source->current_path, "");
    source->name = memory_printf("%s", name);
    source->overlay_files = json_object();
    source->names = json_object();
    source->not_recorded = json_pack("{s:s, s:s}", "state", "not recorded", "why", "the snapshot does not say");
    source->full = cache_failure(SOURCE_FAILED, "more than 64 MiB were read from this machine");
    source->refused = json_pack("{s:o, s:o}", TOO_LONG, cache_failure(SOURCE_FAILED, TOO_LONG), RELATIVE,
                                cache_failure(SOURCE_FAILED, RELATIVE));
    for (int kind = 0; kind < CACHE_KINDS; kind++) {
        source->cached[kind] = json_object();
        source->memos[kind] = json_object();
    }
    return source;
}

void source_free(struct source *source)
{
    if (!source)
        return;
    for (struct source_block *block = source->blocks, *next; block; block = next) {
        next = block->next;
        free(block);
    }
    for (int kind = 0; kind < CACHE_KINDS; kind++) {
        json_decref(source->cached[kind]);
        json_decref(source->memos[kind]);
    }
    json_decref(source->overlay_files);
    json_decref(source->names);
    json_decref(source->not_recorded);
    json_decref(source->refused);
    json_decref(source->full);
    dir_close(source->fd);
    free(source->name);
    free(source);
}
