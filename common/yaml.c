/* SPDX-License-Identifier: Apache-2.0 */
#include "common/yaml.h"

#include "common/memory.h"

#include "base/error.h"

#include <stdlib.h>
#include <string.h>
#include <yaml.h>

struct reader {
    const char *name;
    const struct yaml_limits *limits;
    yaml_parser_t parser;
    int n_nodes;
};

static ep_status next(struct reader *reader, yaml_event_t *ret_event)
{
    if (yaml_parser_parse(&reader->parser, ret_event))
        return EP_OK;
    if (reader->parser.error == YAML_MEMORY_ERROR)
        return ep_fail(EP_E_MEMORY, "%s: no memory", reader->name);
    if (reader->parser.error == YAML_READER_ERROR) {
        int line = (int)reader->parser.mark.line + 1;

        return ep_fail(EP_E_ARG, "%s:%d: not text: %s", reader->name, line, reader->parser.problem);
    }
    return ep_fail(EP_E_ARG, "%s:%zu: not valid YAML: %s%s%s", reader->name, reader->parser.problem_mark.line + 1,
                   reader->parser.problem ? reader->parser.problem : "syntax error", reader->parser.context ? " " : "",
                   reader->parser.context ? reader->parser.context : "");
}

static ep_status refuse(const struct reader *reader, int line, const char *what)
{
    return ep_fail(EP_E_ARG, "%s:%d: %s", reader->name, line, what);
}

/* refuse_kind() writes the kind of file between the texts. */
static ep_status refuse_kind(const struct reader *reader, int line, const char *before, const char *after)
{
    return ep_fail(EP_E_ARG, "%s:%d: %s a %s%s", reader->name, line, before, reader->limits->what, after);
}

/* Checks for a forbidden anchor or tag. libyaml gives the tag "!" to quoted scalars. */
static ep_status check_plain(const struct reader *reader, int line, const yaml_char_t *anchor, const yaml_char_t *tag)
{
    if (anchor)
        return refuse_kind(reader, line, "anchors are not accepted in", ": write the value out");
    if (tag && strcmp((const char *)tag, "!") != 0)
        return refuse_kind(reader, line, "tags are not accepted in", "");
    return EP_OK;
}

/* Room for one more item; the new item is zeroed. */
static void grow(struct yaml_node *node)
{
    /* The room doubles each time that it is full, which is when n is a power of two. */
    if ((node->n & (node->n - 1)) == 0) {
        size_t room = node->n ? 2 * node->n : 1;

        node->items = memory_grow(node->items, room * sizeof(*node->items));
        node->keys = memory_grow(node->keys, room * sizeof(*node->keys));
        node->key_lines = memory_grow(node->key_lines, room * sizeof(*node->key_lines));
    }
    memset(&node->items[node->n], 0, sizeof(*node->items));
    node->keys[node->n] = NULL;
    node->key_lines[node->n] = 0;
}

static void free_inside(struct yaml_node *node)
{
    for (size_t i = 0; i < node->n; i++) {
        free(node->keys[i]);
        free_inside(&node->items[i]);
    }
    free(node->text);
    free(node->items);
    free(node->keys);
    free(node->key_lines);
}

static ep_status read_node(struct reader *reader, const yaml_event_t *event, int depth, struct yaml_node *ret_node);

static ep_status read_scalar(struct reader *reader, const yaml_event_t *event, char **ret_text)
{
    size_t bytes = event->data.scalar.length;
    int line = (int)event->start_mark.line + 1;

    EP_TRY(check_plain(reader, line, event->data.scalar.anchor, event->data.scalar.tag));
    if (memchr(event->data.scalar.value, 0, bytes))
        return refuse(reader, line, "a NUL character in a text");
    *ret_text = memory_printf("%.*s", (int)bytes, (const char *)event->data.scalar.value);
    return EP_OK;
}

static ep_status read_key(struct reader *reader, const yaml_event_t *event, struct yaml_node *map)
{
    int line = (int)event->start_mark.line + 1;
    char *key = NULL;

    if (event->type != YAML_SCALAR_EVENT)
        return refuse(reader, line, "a key must be a plain word");
    if (event->data.scalar.style == YAML_PLAIN_SCALAR_STYLE && event->data.scalar.length == 2 &&
        memcmp(event->data.scalar.value, "<<", 2) == 0)
        return refuse(reader, line, "merge keys (<<) are not accepted: write the keys out");
    EP_TRY(read_scalar(reader, event, &key));
    map->keys[map->n] = key;
    map->key_lines[map->n] = line;
    for (size_t i = 0; i < map->n; i++) {
        if (strcmp(map->keys[i], key) == 0) {
            ep_status status = ep_fail(EP_E_ARG, "%s:%d: '%.64s' is a duplicate; the first one is in line %d",
                                       reader->name, line, key, map->key_lines[i]);

            free(key);
            map->keys[map->n] = NULL;
            return status;
        }
    }
    return EP_OK;
}

/* Items until the end event of the collection. */
static ep_status read_items(struct reader *reader, int depth, struct yaml_node *node)
{
    yaml_event_type_t end = node->kind == YAML_MAP ? YAML_MAPPING_END_EVENT : YAML_SEQUENCE_END_EVENT;
    ep_status status = EP_OK;

    while (status == EP_OK) {
        yaml_event_t event;

        EP_TRY(next(reader, &event));
        if (event.type == end) {
            yaml_event_delete(&event);
            return EP_OK;
        }
        grow(node);
        if (node->kind == YAML_MAP) {
            status = read_key(reader, &event, node);
            yaml_event_delete(&event);
            if (status != EP_OK)
                return status;
            status = next(reader, &event);
            if (status != EP_OK) {
                free(node->keys[node->n]);
                return status;
            }
        }
        node->n += status == EP_OK;
        if (status == EP_OK)
            status = read_node(reader, &event, depth + 1, &node->items[node->n - 1]);
        yaml_event_delete(&event);
    }
    return status;
}

static ep_status read_node(struct reader *reader, const yaml_event_t *event, int depth, struct yaml_node *ret_node)
{
    int line = (int)event->start_mark.line + 1;

    ret_node->line = line;
    if (++reader->n_nodes > reader->limits->nodes_max)
        return refuse_kind(reader, line, "too many values for", "");
    if (depth > reader->limits->depth_max)
        return refuse_kind(reader, line, "nested too deeply for", "");
    switch (event->type) {
    case YAML_SCALAR_EVENT:
        ret_node->kind = YAML_SCALAR;
        ret_node->plain = event->data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
        return read_scalar(reader, event, &ret_node->text);
    case YAML_SEQUENCE_START_EVENT:
        ret_node->kind = YAML_LIST;
        EP_TRY(check_plain(reader, line, event->data.sequence_start.anchor, event->data.sequence_start.tag));
        return read_items(reader, depth, ret_node);
    case YAML_MAPPING_START_EVENT:
        ret_node->kind = YAML_MAP;
        EP_TRY(check_plain(reader, line, event->data.mapping_start.anchor, event->data.mapping_start.tag));
        return read_items(reader, depth, ret_node);
    case YAML_ALIAS_EVENT:
        return refuse_kind(reader, line, "aliases are not accepted in", ": write the value out");
    default:
        return refuse(reader, line, "unexpected YAML");
    }
}

/* Documents until the end of the file: *ret_node is the only one, or a list of them. */
static ep_status read_documents(struct reader *reader, struct yaml_node *ret_node)
{
    bool many = reader->limits->many;
    int n = 0;

    ret_node->kind = many ? YAML_LIST : YAML_SCALAR;
    while (true) {
        struct yaml_node *node = ret_node;
        yaml_event_t event;
        ep_status status = EP_OK;

        EP_TRY(next(reader, &event));
        if (event.type == YAML_STREAM_END_EVENT)
            break;
        if (event.type == YAML_DOCUMENT_START_EVENT && !many && n > 0)
            status = refuse_kind(reader, (int)event.start_mark.line + 1, "a second document:", " must be one document");
        if (event.type != YAML_STREAM_START_EVENT && event.type != YAML_DOCUMENT_START_EVENT &&
            event.type != YAML_DOCUMENT_END_EVENT) {
            n++;
            if (many)
                grow(ret_node);
            if (many)
                node = &ret_node->items[ret_node->n++];
            if (status == EP_OK)
                status = read_node(reader, &event, 0, node);
        }
        yaml_event_delete(&event);
        EP_TRY(status);
    }
    return n > 0 || many ? EP_OK : refuse(reader, 1, "the file is empty");
}

ep_status tree_parse(const char *name, const char *text, size_t bytes, const struct yaml_limits *limits,
                     struct yaml_node **ret_node)
{
    struct reader reader = {.name = name, .limits = limits};
    struct yaml_node *node;
    ep_status status;

    if (bytes > limits->bytes_max)
        return ep_fail(EP_E_ARG, "%s:1: larger than %zu KiB: not a %s", name, limits->bytes_max >> 10, limits->what);
    if (!yaml_parser_initialize(&reader.parser))
        return ep_fail(EP_E_MEMORY, "%s: no memory", name);
    node = memory_new(1, sizeof(*node));
    yaml_parser_set_input_string(&reader.parser, (const unsigned char *)text, bytes);
    status = read_documents(&reader, node);
    yaml_parser_delete(&reader.parser);
    if (status != EP_OK) {
        tree_free(node);
        return status;
    }
    *ret_node = node;
    return EP_OK;
}

void tree_free(struct yaml_node *node)
{
    if (!node)
        return;
    free_inside(node);
    free(node);
}

const struct yaml_node *tree_get(const struct yaml_node *map, const char *key)
{
    for (size_t i = 0; map->kind == YAML_MAP && i < map->n; i++)
        if (strcmp(map->keys[i], key) == 0)
            return &map->items[i];
    return NULL;
}
