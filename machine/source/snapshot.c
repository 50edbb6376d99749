/* SPDX-License-Identifier: Apache-2.0 */
/*
 * snapshot.c - converts the cache to a document and back.
 *
 *     {"epkit_snapshot": 1, "full": true, "files": {"/path": entry, ...}, "folders": {...}, ...}
 *
 * Entries are those of cache.h. "full" records that the cache was full, so that later queries fail as they did.
 * Snapshots are untrusted input: what is accepted satisfies source.h, and errors name what was rejected.
 */
#include "common/dir.h"
#include "common/memory.h"
#include "common/output.h"
#include "common/temporary.h"
#include "common/text.h"
#include "scrub.h"
#include "state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FORMAT 1
#define VALUES_MAX (1u << 20) /* in a document; each takes about 100 bytes of memory */

bool snapshot_is_bounded(const char *text, size_t bytes)
{
    bool in_string = false;
    size_t values = 0;

    for (size_t i = 0; i < bytes; i++) {
        if (in_string && text[i] == '\\')
            i++;
        else if (text[i] == '"')
            in_string = !in_string;
        else if (!in_string)
            values += text[i] == ',' || text[i] == '{' || text[i] == '[';
    }
    return values <= VALUES_MAX;
}

/* --- validation of entries; NULL or an error --- */

static bool has_nul(const json_t *string)
{
    return strlen(json_string_value(string)) != json_string_length(string);
}

/* NULL if it is missing, unlike an empty string. */
static const char *string_in(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);

    return json_is_string(value) && !has_nul(value) ? json_string_value(value) : NULL;
}

static const char *check_failure(const json_t *entry)
{
    const char *why;

    switch (cache_state(entry, &why)) {
    case SOURCE_ABSENT:
    case SOURCE_DENIED:
    case SOURCE_FAILED:
        break;
    default:
        return "\"state\" is not one of absent, denied, failed";
    }
    if (json_object_size(entry) > (json_object_get(entry, "why") ? 2u : 1u))
        return "has more than \"state\" and \"why\"";
    return json_object_get(entry, "why") && !string_in(entry, "why") ? "\"why\" is not a text" : NULL;
}

static const char *check_text(const json_t *entry)
{
    if (!json_is_string(entry))
        return "is neither a text nor an object with \"state\"";
    return json_string_length(entry) > SOURCE_FILE_MAX ? "is a text of more than 8 MiB" : NULL;
}

static const char *check_link(const json_t *entry)
{
    if (!json_is_string(entry))
        return "is neither a path nor an object with \"state\"";
    if (json_string_value(entry)[0] != '/' || has_nul(entry) || json_string_length(entry) >= PATH_MAX)
        return "is not an absolute path";
    return NULL;
}

static const char *check_names(const json_t *entry)
{
    if (!json_is_array(entry))
        return "is neither a list of names nor an object with \"state\"";
    if (json_array_size(entry) > SOURCE_NAMES_MAX)
        return "has more than 16384 names";
    FOR_JSON (name, entry) {
        const char *text = json_string_value(name);

        if (!text || has_nul(name) || !text[0] || strchr(text, '/') || strcmp(text, ".") == 0 ||
            strcmp(text, "..") == 0)
            return "has an invalid file name";
    }
    return NULL;
}

static const char *check_stat(const json_t *entry)
{
    const char *kind = string_in(entry, "kind"), *access = string_in(entry, "access");
    const json_t *bytes = json_object_get(entry, "bytes");

    if (!json_is_object(entry))
        return "is not an object";
    if (!kind || !text_is_any(kind, TEXTS("file", "folder", "char", "other")))
        return "\"kind\" is not one of file, folder, char, other";
    if (!json_is_integer(bytes) || json_integer_value(bytes) < 0)
        return "\"bytes\" is not a number of bytes";
    if (!access || strlen(access) != 3 || (access[0] != 'r' && access[0] != '-') ||
        (access[1] != 'w' && access[1] != '-') || (access[2] != 'x' && access[2] != '-'))
        return "\"access\" is not of the form \"rwx\" with \"-\" for what is not allowed";
    return json_object_size(entry) > 3 ? "has more than \"kind\", \"bytes\" and \"access\"" : NULL;
}

/* Its contents are checked by elf.c, which trusts no file either. */
static const char *check_object(const json_t *entry)
{
    return json_is_object(entry) ? NULL : "is not an object";
}

static const char *check_answer(const json_t *entry)
{
    if (!json_object_get(entry, "value"))
        return "has neither \"value\" nor \"state\"";
    return json_object_size(entry) > 1 ? "has more than \"value\"" : NULL;
}

static const char *check_key(enum cache_kind kind, const char *key)
{
    char path[PATH_MAX], plain[PATH_MAX];
    const char *tab = strchr(key, '\t');
    bool has_two = kind == CACHE_LINES || kind == CACHE_FACTS;
    size_t bytes = has_two && tab ? (size_t)(tab - key) : strlen(key);

    if (kind == CACHE_ANSWERS)
        return NULL;
    if (has_two && !tab)
        return kind == CACHE_LINES ? "is not a path, tab and text to search" : "is not a path, tab and name of a fact";
    if (bytes >= sizeof(path))
        return "is too long for a path";
    memcpy(path, key, bytes);
    path[bytes] = '\0';
    if (cache_plain_path(path, plain) || strcmp(path, plain) != 0)
        return "is not an absolute path in its plain form, as /a/b";
    return NULL;
}

static const char *check_entry(enum cache_kind kind, const json_t *entry)
{
    static const char *(*const checks[CACHE_KINDS])(const json_t *) = {
        [CACHE_FILES] = check_text,     [CACHE_FOLDERS] = check_names, [CACHE_LINKS] = check_link,
        [CACHE_STATS] = check_stat,     [CACHE_LINES] = check_text,    [CACHE_ELF] = check_object,
        [CACHE_ANSWERS] = check_answer, [CACHE_FACTS] = check_answer};

    return json_object_get(entry, "state") ? check_failure(entry) : checks[kind](entry);
}

/* --- reading --- */

/* Where an older epkit saved bytes that are not UTF-8, {"hex": "de10"}, their text; else the entry. A new reference. */
static json_t *entry_of(json_t *given)
{
    const char *hex = json_object_size(given) == 1 ? json_string_value(json_object_get(given, "hex")) : NULL;
    size_t n = hex ? strlen(hex) / 2 : 0, at = 0;
    json_t *text = NULL;
    unsigned char *bytes;

    if (json_is_array(given)) {
        text = json_array();
        FOR_JSON (item, given)
            json_array_append_new(text, entry_of(item));
        return text;
    }
    bytes = hex ? malloc(n + 1) : NULL;
    while (bytes && at < n && sscanf(hex + 2 * at, "%2hhx", &bytes[at]) == 1)
        at++;
    if (bytes && at == n)
        text = json_stringn_nocheck((const char *)bytes, n);
    free(bytes);
    return text ? text : json_incref(given);
}

static ep_status load_kind(struct source *source, const char *what, enum cache_kind kind, const json_t *given)
{
    const char *why, *name = cache_kind_names[kind];
    char shown[256];

    if (!json_is_object(given))
        return ep_fail(EP_E_ARG, "%s: \"%s\" is not an object", what, name);
    FOR_MEMBERS (key, entry, given) {
        /* An older epkit saved paths that are not UTF-8 so; no answer depends on one. */
        if (strncmp(key, "hex:", 4) == 0)
            continue;
        entry = entry_of(entry);
        why = check_key(kind, key);
        if (!why)
            why = check_entry(kind, entry);
        if (!why && cache_put(source, kind, key, json_incref(entry)) == source->full)
            why = "is too much: all entries together are more than 64 MiB";
        json_decref(entry);
        text_clean(key, shown, sizeof(shown));
        if (why)
            return ep_fail(EP_E_ARG, "%s: \"%s\": \"%s\": %s", what, name, shown, why);
    }
    return EP_OK;
}

static ep_status load_members(struct source *source, const char *what, const json_t *document)
{
    const json_t *format = json_object_get(document, "epkit_snapshot");
    char shown[64];

    if (!json_is_integer(format))
        return ep_fail(EP_E_ARG, "%s: has no \"epkit_snapshot\" with a number, so it is not a snapshot", what);
    if (json_integer_value(format) != FORMAT)
        return ep_fail(EP_E_ARG, "%s: \"epkit_snapshot\" is %lld; this epkit reads format %d", what,
                       (long long)json_integer_value(format), FORMAT);
    FOR_MEMBERS (key, value, document) {
        int kind = FIRST_OF(k, CACHE_KINDS, strcmp(key, cache_kind_names[k]) == 0);

        if (kind >= 0)
            EP_TRY(load_kind(source, what, (enum cache_kind)kind, value));
        if (strcmp(key, "full") == 0 && !json_is_boolean(value))
            return ep_fail(EP_E_ARG, "%s: \"full\" is neither true nor false", what);
        if (kind < 0 && strcmp(key, "epkit_snapshot") != 0 && strcmp(key, "full") != 0) {
            text_clean(key, shown, sizeof(shown));
            return ep_fail(EP_E_ARG, "%s: unknown key \"%s\"", what, shown);
        }
    }
    source->is_full = json_is_true(json_object_get(document, "full"));
    return EP_OK;
}

/* Snapshots are often compressed before they are sent. */
static bool is_compressed(const char *text, size_t bytes)
{
    static const struct {
        const char *begin;
        size_t n;
    } formats[] = {{"\x1f\x8b", 2}, {"\x28\xb5\x2f\xfd", 4}, {"\xfd\x37zXZ", 5}}; /* gzip, zstd, xz */

    return ANY_OF(i, COUNT(formats), bytes >= formats[i].n && memcmp(text, formats[i].begin, formats[i].n) == 0);
}

ep_status snapshot_load(struct source *source, const char *what, const char *text, size_t bytes)
{
    json_error_t error;
    ep_status status;
    json_t *document;
    char said[JSON_ERROR_TEXT_LENGTH];

    /* A byte order mark of an editor, which jansson refuses. */
    if (bytes >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) {
        text += 3;
        bytes -= 3;
    }
    if (is_compressed(text, bytes))
        return ep_fail(EP_E_ARG, "%s: it is compressed: decompress it first (gunzip, unzstd, unxz)", what);
    if (!snapshot_is_bounded(text, bytes))
        return ep_fail(EP_E_ARG, "%s: has more than %u values, so it is not a snapshot", what, VALUES_MAX);
    document = json_loadb(text, bytes, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &error);
    if (!document) {
        text_clean(error.text, said, sizeof(said));
        return ep_fail(EP_E_ARG, "%s: line %d, column %d: %s", what, error.line, error.column, said);
    }
    status = json_is_object(document) ? load_members(source, what, document)
                                      : ep_fail(EP_E_ARG, "%s: is not a JSON object, so it is not a snapshot", what);
    json_decref(document);
    return status;
}

/* --- writing --- */

char *snapshot_text(struct source *source)
{
    json_t *document = scrub_snapshot(source->cached, source->is_live);
    char *text;

    json_object_set_new(document, "epkit_snapshot", json_integer(FORMAT));
    if (source->is_full)
        json_object_set_new(document, "full", json_true());
    text = stream_json_text(document, JSON_INDENT(1));
    json_decref(document);
    return text;
}

ep_status source_save(struct source *source, const char *file)
{
    char *text = snapshot_text(source), *lines;
    int number;

    if (!text)
        return ep_fail(EP_E_SYSTEM, "%s is not written: the snapshot holds what JSON cannot", file);
    lines = memory_printf("%s\n", text);
    free(text);
    /* The usual permissions of a new file. */
    number = temporary_save(file, lines, strlen(lines), dir_usual_mode());
    free(lines);
    if (number == 0)
        return EP_OK;
    return ep_fail(number == EINVAL ? EP_E_ARG : EP_E_SYSTEM, "%s: cannot be written: %s", file, write_reason(number));
}
