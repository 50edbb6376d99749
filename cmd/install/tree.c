/* SPDX-License-Identifier: Apache-2.0 */
#include "tree.h"

#include "base/error.h"

#include <stdlib.h>
#include <string.h>
#include <yaml.h>

struct reader {
    const char *name;
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

        return ep_fail(EP_E_ARG, "%s:%d: not UTF-8 text: %s", reader->name, line, reader->parser.problem);
    }
    return ep_fail(EP_E_ARG, "%s:%zu: not valid YAML: %s%s%s", reader->name, reader->parser.problem_mark.line + 1,
                   reader->parser.problem ? reader->parser.problem : "syntax error", reader->parser.context ? " " : "",
                   reader->parser.context ? reader->parser.context : "");
}

static ep_status refuse(const struct reader *reader, int line, const char *what)
{
    return ep_fail(EP_E_ARG, "%s:%d: %s", reader->name, line, what);
}

/* Checks for a forbidden anchor or tag. libyaml gives the tag "!" to quoted scalars. */
static ep_status check_plain(const struct reader *reader, int line, const yaml_char_t *anchor, const yaml_char_t *tag)
{
    if (anchor)
        return refuse(reader, line, "anchors are not accepted in a recipe: write the value out");
    if (tag && strcmp((const char *)tag, "!") != 0)
        return refuse(reader, line, "tags are not accepted in a recipe");
    return EP_OK;
}

/* Room for one more item; the new item is zeroed. */
static ep_status grow(const struct reader *reader, struct yaml_node *node)
{
    size_t room = node->n ? node->n * 2 : 4;
    void *items, *keys, *lines;

    /* Full at 0, 4, 8, 16, ... items. */
    if (node->n && (node->n < 4 || (node->n & (node->n - 1)) != 0))
        goto ready;
    items = realloc(node->items, room * sizeof(*node->items));
    if (items)
        node->items = items;
    keys = realloc(node->keys, room * sizeof(*node->keys));
    if (keys)
        node->keys = keys;
    lines = realloc(node->key_lines, room * sizeof(*node->key_lines));
    if (lines)
        node->key_lines = lines;
    if (!items || !keys || !lines)
        return ep_fail(EP_E_MEMORY, "%s: no memory", reader->name);
ready:
    memset(&node->items[node->n], 0, sizeof(*node->items));
    node->keys[node->n] = NULL;
    node->key_lines[node->n] = 0;
    return EP_OK;
}

static ep_status read_node(struct reader *reader, const yaml_event_t *event, int depth, struct yaml_node *ret_node);

static ep_status read_scalar(struct reader *reader, const yaml_event_t *event, char **ret_text)
{
    size_t bytes = event->data.scalar.length;
    int line = (int)event->start_mark.line + 1;

    EP_TRY(check_plain(reader, line, event->data.scalar.anchor, event->data.scalar.tag));
    if (memchr(event->data.scalar.value, 0, bytes))
        return refuse(reader, line, "a NUL character in a text");
    *ret_text = malloc(bytes + 1);
    if (!*ret_text)
        return ep_fail(EP_E_MEMORY, "%s: no memory", reader->name);
    memcpy(*ret_text, event->data.scalar.value, bytes);
    (*ret_text)[bytes] = '\0';
    return EP_OK;
}

static ep_status read_key(struct reader *reader, const yaml_event_t *event, struct yaml_node *map)
{
    int line = (int)event->start_mark.line + 1;
    char *key;

    if (event->type != YAML_SCALAR_EVENT)
        return refuse(reader, line, "a key must be a plain word");
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
        status = grow(reader, node);
        if (status == EP_OK && node->kind == YAML_MAP) {
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
    if (++reader->n_nodes > YAML_NODES_MAX)
        return refuse(reader, line, "too many values for a recipe");
    if (depth > YAML_DEPTH_MAX)
        return refuse(reader, line, "nested too deeply for a recipe");
    switch (event->type) {
    case YAML_SCALAR_EVENT:
        ret_node->kind = YAML_SCALAR;
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
        return refuse(reader, line, "aliases are not accepted in a recipe: write the value out");
    default:
        return refuse(reader, line, "unexpected YAML");
    }
}

static ep_status read_document(struct reader *reader, struct yaml_node *ret_node)
{
    static const yaml_event_type_t before[] = {YAML_STREAM_START_EVENT, YAML_DOCUMENT_START_EVENT};
    yaml_event_t event;
    ep_status status;

    for (size_t i = 0; i < 2; i++) {
        yaml_event_type_t type;

        EP_TRY(next(reader, &event));
        type = event.type;
        yaml_event_delete(&event);
        if (type != before[i])
            return refuse(reader, 1, "the file is empty");
    }
    EP_TRY(next(reader, &event));
    status = read_node(reader, &event, 0, ret_node);
    yaml_event_delete(&event);
    for (size_t i = 0; i < 2 && status == EP_OK; i++) {
        status = next(reader, &event);
        if (status != EP_OK)
            return status;
        if (i == 1 && event.type != YAML_STREAM_END_EVENT)
            status = refuse(reader, (int)event.start_mark.line + 1, "a second document: a recipe must be one document");
        yaml_event_delete(&event);
    }
    return status;
}

ep_status tree_parse(const char *name, const char *text, size_t bytes, struct yaml_node **ret_node)
{
    struct reader reader = {.name = name};
    struct yaml_node *node;
    ep_status status;

    if (bytes > YAML_BYTES_MAX)
        return ep_fail(EP_E_ARG, "%s:1: larger than %u KiB: not a recipe", name, YAML_BYTES_MAX >> 10);
    node = calloc(1, sizeof(*node));
    if (!node || !yaml_parser_initialize(&reader.parser)) {
        free(node);
        return ep_fail(EP_E_MEMORY, "%s: no memory", name);
    }
    yaml_parser_set_input_string(&reader.parser, (const unsigned char *)text, bytes);
    status = read_document(&reader, node);
    yaml_parser_delete(&reader.parser);
    if (status != EP_OK) {
        tree_free(node);
        return status;
    }
    *ret_node = node;
    return EP_OK;
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
