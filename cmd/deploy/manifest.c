/* SPDX-License-Identifier: Apache-2.0 */
/* manifest.c - converts YAML to JSON, as far as Kubernetes accepts it. */
#include "base/error.h"
#include "deploy.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

#define TEMPLATE_HINT "; a template with {{ }} has to be rendered first: helm template"

/* Aliases may nest: a few lines can expand beyond all memory, or refer to themselves. */
#define VALUES_MAX 200000
#define DEPTH_MAX 64
#define ANCHORS_MAX 1000

enum limit { LIMIT_NONE, LIMIT_DEPTH, LIMIT_VALUES, LIMIT_ANCHORS };

struct reader {
    yaml_document_t *document;
    int n_values;
    bool is_template; /* if it is not YAML, that may be because it is a template */
};

static json_t *value_of(struct reader *reader, const yaml_node_t *node, int depth);

/* Values and anchors are those of all documents. */
static ep_status refuse_limit(enum limit limit, unsigned long line)
{
    switch (limit) {
    case LIMIT_DEPTH:
        return ep_fail(
            EP_E_ARG,
            "line %lu: nested more than %d levels deep: close its brackets, and let no alias (*name) contain itself",
            line, DEPTH_MAX);
    case LIMIT_VALUES:
        return ep_fail(EP_E_ARG,
                       "line %lu: the manifest has more than %d values, each alias (*name) counted with its contents: "
                       "use fewer aliases, or check a part of it at a time",
                       line, VALUES_MAX);
    default:
        return ep_fail(
            EP_E_ARG,
            "line %lu: the manifest has more than %d anchors (&name): write the values out, or check a part of "
            "it at a time",
            line, ANCHORS_MAX);
    }
}

static bool is_word(const char *text, const char *const *words)
{
    for (; *words; words++)
        if (strcmp(text, *words) == 0)
            return true;
    return false;
}

/* The type of a plain scalar follows from its text; a quoted scalar is a string. */
static json_t *scalar_of(const yaml_node_t *node)
{
    static const char *const nulls[] = {"", "~", "null", "Null", "NULL", NULL};
    static const char *const yes[] = {"true", "True", "TRUE", NULL}, *const no[] = {"false", "False", "FALSE", NULL};
    const char *text = (const char *)node->data.scalar.value;
    char *end;
    long long whole;
    double real;

    if (node->data.scalar.style != YAML_PLAIN_SCALAR_STYLE)
        return json_stringn(text, node->data.scalar.length);
    if (is_word(text, nulls))
        return json_null();
    if (is_word(text, yes) || is_word(text, no))
        return json_boolean(is_word(text, yes));
    if (isdigit((unsigned char)text[0]) || strchr("+-.", text[0])) {
        errno = 0;
        whole = strtoll(text, &end, text[0] == '0' && isdigit((unsigned char)text[1]) ? 8 : 10);
        if (errno == 0 && *end == '\0' && end != text)
            return json_integer(whole);
        real = strtod(text, &end);
        if (*end == '\0' && end != text && isfinite(real) && !strpbrk(text, "xXpPnN"))
            return json_real(real);
    }
    return json_stringn(text, node->data.scalar.length);
}

static json_t *sequence_of(struct reader *reader, const yaml_node_t *node, int depth)
{
    json_t *array = json_array();

    for (yaml_node_item_t *item = node->data.sequence.items.start; item < node->data.sequence.items.top; item++) {
        json_t *value = value_of(reader, yaml_document_get_node(reader->document, *item), depth);

        if (!value || json_array_append_new(array, value) != 0) {
            json_decref(array);
            return NULL;
        }
    }
    return array;
}

/* "<<: *name", which kubectl understands: the keys of a mapping, or of a list of them, that `object` does not have. */
static bool merge(struct reader *reader, const yaml_node_t *node, int depth, unsigned long line, json_t *object)
{
    json_t *value = value_of(reader, node, depth), *part;
    bool is_list = json_is_array(value), good = is_list || json_is_object(value);
    size_t i;

    if (value && !is_list)
        json_object_update_missing(object, value);
    json_array_foreach(is_list ? value : NULL, i, part) good =
        good && json_is_object(part) && json_object_update_missing(object, part) == 0;
    if (value && !good)
        ep_fail(EP_E_ARG, "line %lu: the value of '<<' is neither a mapping nor a list of mappings", line);
    json_decref(value);
    return good;
}

static bool is_merge(const yaml_node_t *key)
{
    return key && key->type == YAML_SCALAR_NODE && key->data.scalar.style == YAML_PLAIN_SCALAR_STYLE &&
           strcmp((const char *)key->data.scalar.value, "<<") == 0;
}

/* A key that is not a scalar comes from a template, in most cases. */
static void refuse_key(const yaml_node_t *key, unsigned long line)
{
    ep_fail(EP_E_ARG, "line %lu: a key is not a plain word%s", line,
            key && key->type == YAML_MAPPING_NODE ? TEMPLATE_HINT : "");
}

static json_t *mapping_of(struct reader *reader, const yaml_node_t *node, int depth)
{
    json_t *object = json_object();

    for (yaml_node_pair_t *pair = node->data.mapping.pairs.start; pair < node->data.mapping.pairs.top; pair++) {
        const yaml_node_t *key = yaml_document_get_node(reader->document, pair->key);
        const char *name = key && key->type == YAML_SCALAR_NODE ? (const char *)key->data.scalar.value : NULL;
        unsigned long line = key ? key->start_mark.line + 1 : 0;
        json_t *value = NULL;

        if (is_merge(key))
            continue;
        if (!name)
            refuse_key(key, line);
        else if (json_object_get(object, name))
            ep_fail(EP_E_ARG, "line %lu: key '%.64s' is there twice", line, name);
        else
            value = value_of(reader, yaml_document_get_node(reader->document, pair->value), depth);
        if (!value) {
            json_decref(object);
            return NULL;
        }
        if (json_object_set_new(object, name, value) != 0) {
            ep_fail(EP_E_ARG, "line %lu: a key is not valid UTF-8", line);
            json_decref(object);
            return NULL;
        }
    }
    /* Keys of the mapping itself win, wherever "<<" stands. */
    for (yaml_node_pair_t *pair = node->data.mapping.pairs.start; pair < node->data.mapping.pairs.top; pair++) {
        const yaml_node_t *key = yaml_document_get_node(reader->document, pair->key);

        if (is_merge(key) && !merge(reader, yaml_document_get_node(reader->document, pair->value), depth,
                                    key->start_mark.line + 1, object)) {
            json_decref(object);
            return NULL;
        }
    }
    return object;
}

/* NULL with the reason recorded. */
static json_t *value_of(struct reader *reader, const yaml_node_t *node, int depth)
{
    json_t *value = NULL;

    if (!node) {
        ep_fail(EP_E_ARG, "a value is missing");
        return NULL;
    }
    if (depth > DEPTH_MAX || ++reader->n_values > VALUES_MAX) {
        refuse_limit(depth > DEPTH_MAX ? LIMIT_DEPTH : LIMIT_VALUES, (unsigned long)node->start_mark.line + 1);
        return NULL;
    }
    switch (node->type) {
    case YAML_SCALAR_NODE:
        value = scalar_of(node);
        if (!value)
            ep_fail(EP_E_ARG, "line %lu: a value is not valid UTF-8", (unsigned long)node->start_mark.line + 1);
        break;
    case YAML_SEQUENCE_NODE:
        value = sequence_of(reader, node, depth + 1);
        break;
    case YAML_MAPPING_NODE:
        value = mapping_of(reader, node, depth + 1);
        break;
    default:
        ep_fail(EP_E_ARG, "line %lu: an empty node", (unsigned long)node->start_mark.line + 1);
        break;
    }
    return value;
}

/* The next document: 1 and *ret_value (NULL for an empty one), 0 at the end, -1 with the reason. */
static int next_document(yaml_parser_t *parser, struct reader *reader, json_t **ret_value)
{
    yaml_document_t document;
    yaml_node_t *top;
    int result = 1;

    *ret_value = NULL;
    if (!yaml_parser_load(parser, &document)) {
        /* What YAML finds wrong in a template of Helm does not say that it is one. */
        ep_fail(EP_E_ARG, "line %lu: %s%s", (unsigned long)parser->problem_mark.line + 1,
                parser->problem ? parser->problem : "not YAML", reader->is_template ? TEMPLATE_HINT : "");
        return -1;
    }
    top = yaml_document_get_root_node(&document);
    if (!top) {
        result = 0;
    } else if (top->type != YAML_SCALAR_NODE || top->data.scalar.length > 0) {
        reader->document = &document;
        *ret_value = value_of(reader, top, 0);
        if (*ret_value && !json_is_object(*ret_value)) {
            if (!json_is_null(*ret_value))
                ep_fail(EP_E_ARG, "line %lu: a document is not an object", (unsigned long)top->start_mark.line + 1);
            result = json_is_null(*ret_value) ? 1 : -1;
            json_decref(*ret_value);
            *ret_value = NULL;
        } else if (!*ret_value) {
            result = -1;
        }
    }
    reader->document = NULL;
    yaml_document_delete(&document);
    return result;
}

/* A list counts as the documents in it. */
static int add_document(json_t *documents, json_t *value)
{
    const json_t *items = json_object_get(value, "items");
    int failed = 0;

    if (json_is_array(items) && strcmp(json_string_value(json_object_get(value, "kind")) ?: "", "List") == 0) {
        size_t i;
        json_t *item;

        json_array_foreach((json_t *)items, i, item) failed |=
            json_is_object(item) ? json_array_append(documents, item) : 0;
        json_decref(value);
        return failed;
    }
    return json_array_append_new(documents, value);
}

/*
 * The limit of depth or anchors that the text exceeds, and in which line; none if it ends before, or has an error.
 * libyaml's time for loading grows with the square of the depth and of the number of anchors: 200 KB of brackets, or a
 * megabyte of anchors, would take minutes.
 */
static enum limit find_limit(const char *text, size_t bytes, unsigned long *ret_line)
{
    int depth = 0, anchors = 0;
    enum limit limit = LIMIT_NONE;
    yaml_parser_t parser;
    bool more = true;

    if (!yaml_parser_initialize(&parser))
        return LIMIT_NONE;
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, bytes);
    while (more && !limit) {
        yaml_event_t event;

        if (!yaml_parser_parse(&parser, &event))
            break;
        switch (event.type) {
        case YAML_SEQUENCE_START_EVENT:
            anchors += event.data.sequence_start.anchor != NULL;
            depth++;
            break;
        case YAML_MAPPING_START_EVENT:
            anchors += event.data.mapping_start.anchor != NULL;
            depth++;
            break;
        case YAML_SCALAR_EVENT:
            anchors += event.data.scalar.anchor != NULL;
            break;
        case YAML_SEQUENCE_END_EVENT:
        case YAML_MAPPING_END_EVENT:
            depth--;
            break;
        default:
            more = event.type != YAML_STREAM_END_EVENT;
            break;
        }
        if (depth > DEPTH_MAX || anchors > ANCHORS_MAX) {
            limit = depth > DEPTH_MAX ? LIMIT_DEPTH : LIMIT_ANCHORS;
            *ret_line = event.start_mark.line + 1;
        }
        yaml_event_delete(&event);
    }
    yaml_parser_delete(&parser);
    return limit;
}

ep_status deploy_manifest_parse(const char *text, size_t bytes, json_t **ret_documents)
{
    struct reader reader = {.is_template = memmem(text, bytes, "{{", 2) != NULL};
    json_t *documents = json_array(), *value;
    unsigned long line = 0;
    enum limit limit;
    yaml_parser_t parser;
    int more;

    if (bytes > DEPLOY_MANIFEST_MAX) {
        json_decref(documents);
        return ep_fail(EP_E_ARG, "the manifest is larger than %u MiB", DEPLOY_MANIFEST_MAX >> 20);
    }
    limit = find_limit(text, bytes, &line);
    if (limit) {
        json_decref(documents);
        return refuse_limit(limit, line);
    }
    if (!documents || !yaml_parser_initialize(&parser)) {
        json_decref(documents);
        return ep_fail(EP_E_MEMORY, "no memory for the manifest");
    }
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, bytes);
    while ((more = next_document(&parser, &reader, &value)) > 0)
        if (value && add_document(documents, value) != 0) {
            ep_fail(EP_E_MEMORY, "no memory for the manifest");
            more = -1;
            break;
        }
    yaml_parser_delete(&parser);
    if (more < 0) {
        json_decref(documents);
        return EP_E_ARG;
    }
    *ret_documents = documents;
    return EP_OK;
}
