/* SPDX-License-Identifier: Apache-2.0 */
/*
 * yaml.h - a YAML file as a tree with line numbers.
 *
 * Mappings, sequences and scalars are accepted. Tags, anchors, aliases, merge keys and duplicate keys are refused, so
 * that no file can expand when it is read. Size, depth and number of nodes are limited.
 */
#ifndef EP_COMMON_YAML_H
#define EP_COMMON_YAML_H

#include <epkit/status.h>
#include <stdbool.h>
#include <stddef.h>

/* What a kind of file may contain. */
struct yaml_limits {
    const char *what; /* for errors: "recipe" */
    size_t bytes_max;
    int depth_max, nodes_max;
    bool many; /* several documents: the tree is a list of them */
};

enum yaml_kind { YAML_SCALAR, YAML_LIST, YAML_MAP };

struct yaml_node {
    enum yaml_kind kind;
    int line;   /* of the file, from 1 */
    char *text; /* scalars: valid UTF-8 without NUL; else NULL */
    bool plain; /* scalars: not quoted */
    size_t n;
    char **keys; /* maps: of each item; lists: NULL */
    int *key_lines;
    struct yaml_node *items; /* in the order of the file */
};

/* EP_E_ARG with "NAME:LINE: reason" in ep_last_error(). The caller frees the tree by tree_free(). */
ep_status tree_parse(const char *name, const char *text, size_t bytes, const struct yaml_limits *limits,
                     struct yaml_node **ret_node);
void tree_free(struct yaml_node *node);

/* The item of a map, or NULL. */
const struct yaml_node *tree_get(const struct yaml_node *map, const char *key);

#endif
