/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tree.h - a YAML file as a tree with line numbers.
 *
 * Only what a recipe needs is accepted: one document of mappings, sequences and scalars. Anchors, aliases, tags and
 * duplicate keys are refused; size, depth and number of nodes are limited, so that no file can expand when it is read.
 */
#ifndef EP_INSTALL_TREE_H
#define EP_INSTALL_TREE_H

#include <epkit/status.h>
#include <stdbool.h>
#include <stddef.h>

#define YAML_BYTES_MAX (256u << 10)
#define YAML_DEPTH_MAX 8
#define YAML_NODES_MAX 8192

enum yaml_kind { YAML_SCALAR, YAML_LIST, YAML_MAP };

struct yaml_node {
    enum yaml_kind kind;
    int line;   /* of the file, from 1 */
    char *text; /* scalars: valid UTF-8 without NUL; else NULL */
    size_t n;
    char **keys; /* maps: of each item; lists: NULL */
    int *key_lines;
    struct yaml_node *items; /* in the order of the file */
};

/*
 * Parses `bytes` of `text`. EP_E_ARG with "NAME:LINE: reason" in ep_last_error(). The caller frees the tree by
 * tree_free().
 */
ep_status tree_parse(const char *name, const char *text, size_t bytes, struct yaml_node **ret_node);
void tree_free(struct yaml_node *node);

/* The item of a map, or NULL. */
const struct yaml_node *tree_get(const struct yaml_node *map, const char *key);

#endif
