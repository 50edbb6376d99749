/* SPDX-License-Identifier: Apache-2.0 */
/* manifest.c - the documents of a manifest as JSON: the type of a plain scalar follows from its text, as kubectl sees
 * it. */
#include "base/error.h"
#include "common/text.h"
#include "common/yaml.h"
#include "deploy.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static json_t *scalar_value(const struct yaml_node *node)
{
    const char *text = node->text;
    char *end;
    long long whole;
    double real;

    if (!node->plain)
        return json_string(text);
    if (text_is_any(text, TEXTS("", "~", "null", "Null", "NULL")))
        return json_null();
    if (text_is_any(text, TEXTS("true", "True", "TRUE", "false", "False", "FALSE")))
        return json_boolean(tolower((unsigned char)*text) == 't');
    if (isdigit((unsigned char)text[0]) || strchr("+-.", text[0])) {
        errno = 0;
        whole = strtoll(text, &end, text[0] == '0' && isdigit((unsigned char)text[1]) ? 8 : 10);
        if (errno == 0 && *end == '\0' && end != text)
            return json_integer(whole);
        real = strtod(text, &end);
        if (*end == '\0' && end != text && isfinite(real) && !strpbrk(text, "xXpPnN"))
            return json_real(real);
    }
    return json_string(text);
}

/* A new reference; NULL: out of memory. */
static json_t *node_value(const struct yaml_node *node)
{
    json_t *value = node->kind == YAML_MAP    ? json_object()
                    : node->kind == YAML_LIST ? json_array()
                                              : scalar_value(node);

    for (size_t i = 0; value && i < node->n; i++) {
        json_t *item = node_value(&node->items[i]);

        if (node->kind == YAML_MAP ? json_object_set_new(value, node->keys[i], item) != 0
                                   : json_array_append_new(value, item) != 0) {
            json_decref(value);
            return NULL;
        }
    }
    return value;
}

/* A list counts as the documents in it; empty documents are left out. Consumes `value`. */
static int add_document(json_t *documents, json_t *value)
{
    json_t *items = json_object_get(value, "items"), *item;
    const char *kind = json_string_value(json_object_get(value, "kind"));
    int failed = 0;
    size_t i;

    if (json_is_null(value) || !json_is_array(items) || !kind || strcmp(kind, "List") != 0)
        return json_is_null(value) ? 0 : json_array_append_new(documents, value);
    json_array_foreach (items, i, item)
        failed |= json_is_object(item) ? json_array_append(documents, item) : 0;
    json_decref(value);
    return failed;
}

ep_status deploy_manifest_parse(const char *name, const char *text, size_t bytes, json_t **ret_documents)
{
    static const struct yaml_limits limits = {.what = "manifest",
                                              .bytes_max = DEPLOY_MANIFEST_MAX,
                                              .depth_max = 64,
                                              .nodes_max = 50000,
                                              .many = true,
                                              .aliases = true};
    json_t *documents = json_array();
    struct yaml_node *tree = NULL;
    ep_status status = documents ? tree_parse(name, text, bytes, &limits, &tree) : EP_E_MEMORY;

    for (size_t i = 0; status == EP_OK && i < tree->n; i++) {
        json_t *value = node_value(&tree->items[i]);

        if (value && !json_is_object(value) && !json_is_null(value)) {
            status = ep_fail(EP_E_ARG, "%s:%d: a document is not an object", name, tree->items[i].line);
            json_decref(value);
        } else if (!value || add_document(documents, value) != 0) {
            status = ep_fail(EP_E_MEMORY, "no memory for the manifest");
        }
    }
    tree_free(tree);
    if (status != EP_OK) {
        json_decref(documents);
        return status;
    }
    *ret_documents = documents;
    return EP_OK;
}
