/* SPDX-License-Identifier: Apache-2.0 */
/* compare_nodes.c - differences between nodes. Documents come from other machines: types of values are checked. */
#include "diagnosis.h"

#include "common/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FACTS_MAX 4096 /* of all nodes together */
#define TEXT_BYTES 1024

/* Facts for a node that has none of these at all: that is one difference, not one for each of them. */
#define ALL_NICS "NICs"
#define ALL_VARIABLES "environment of the stack"
#define NO_NIC "none"
#define NO_VARIABLE "not set at all"

static const char *const versions[][2] = {
    {"kernel", "kernel"},
    {"driver", "NVIDIA driver"},
    {"doca", "DOCA-OFED"},
    {"nvshmem", "NVSHMEM"},
    {"nccl", "NCCL"},
    {"deepep", "DeepEP"},
    {"nvlink_domain", "NVLink domain"},
};

/* A string of a document, safe to print; "" if it is not a string. */
static const char *text_of(const json_t *value, char *room, size_t bytes)
{
    room[0] = '\0';
    if (json_is_string(value))
        text_clean(json_string_value(value), room, bytes);
    return room;
}

static void set(json_t *flat, const char *fact, const char *value)
{
    if (json_object_size(flat) < FACTS_MAX)
        json_object_set_new(flat, fact, json_string(value));
}

/* --- one document as {fact: text} --- */

static void flatten_gpus(json_t *flat, const json_t *gpus)
{
    char name[256] = "", text[TEXT_BYTES];
    size_t n = json_array_size(gpus), n_alike = 0;

    if (n == 0) {
        set(flat, "GPUs", "none");
        return;
    }
    text_of(json_array_get(gpus, 0), name, sizeof(name));
    for (size_t i = 0; i < n; i++) {
        char other[256];

        n_alike += strcmp(text_of(json_array_get(gpus, i), other, sizeof(other)), name) == 0;
    }
    if (n_alike == n)
        snprintf(text, sizeof(text), "%zu x %s", n, name);
    else
        snprintf(text, sizeof(text), "%zu, of several kinds (%s and others)", n, name);
    set(flat, "GPUs", text);
}

static void flatten_nics(json_t *flat, const json_t *nics)
{
    set(flat, ALL_NICS, json_array_size(nics) ? "some" : NO_NIC);
    for (size_t i = 0; i < json_array_size(nics); i++) {
        const json_t *nic = json_array_get(nics, i);
        char name[128], state[64], layer[64], role[64], firmware[64], fact[160], text[TEXT_BYTES];

        text_of(json_object_get(nic, "name"), name, sizeof(name));
        text_of(json_object_get(nic, "state"), state, sizeof(state));
        text_of(json_object_get(nic, "link_layer"), layer, sizeof(layer));
        text_of(json_object_get(nic, "role"), role, sizeof(role));
        text_of(json_object_get(nic, "firmware"), firmware, sizeof(firmware));
        snprintf(fact, sizeof(fact), "NIC %s", name);
        snprintf(text, sizeof(text), "%s, %g Gb/s, %s, %s, firmware %s", state,
                 json_number_value(json_object_get(nic, "rate_gbps")), layer, role, *firmware ? firmware : "unknown");
        set(flat, fact, text);
    }
}

static void flatten_environment(json_t *flat, json_t *environment)
{
    const char *key;
    json_t *value;

    set(flat, ALL_VARIABLES, json_object_size(environment) ? "set" : NO_VARIABLE);
    json_object_foreach (environment, key, value) {
        char name[256], fact[300], text[TEXT_BYTES];

        text_clean(key, name, sizeof(name));
        snprintf(fact, sizeof(fact), "$%s", name);
        set(flat, fact, text_of(value, text, sizeof(text)));
    }
}

static bool is_finding(const json_t *check)
{
    const char *outcome = json_string_value(json_object_get(check, "outcome"));

    return outcome && strcmp(outcome, "found") == 0;
}

static json_t *flatten(const json_t *document)
{
    json_t *flat = json_object(), *facts = json_object_get(document, "facts");
    const json_t *checks = json_object_get(document, "checks");
    char text[TEXT_BYTES];

    set(flat, "epkit", text_of(json_object_get(document, "epkit"), text, sizeof(text)));
    for (size_t i = 0; i < COUNT(versions); i++) {
        text_of(json_object_get(facts, versions[i][0]), text, sizeof(text));
        set(flat, versions[i][1], *text ? text : "none");
    }
    flatten_gpus(flat, json_object_get(facts, "gpus"));
    flatten_nics(flat, json_object_get(facts, "nics"));
    flatten_environment(flat, json_object_get(facts, "environment"));
    for (size_t i = 0; i < json_array_size(checks); i++) {
        char id[64], fact[80];

        if (!is_finding(json_array_get(checks, i)))
            continue;
        text_of(json_object_get(json_array_get(checks, i), "id"), id, sizeof(id));
        snprintf(fact, sizeof(fact), "finding %s", id);
        set(flat, fact, "yes");
    }
    return flat;
}

/* The value shown for a node without this fact. */
static const char *missing(const char *fact)
{
    if (*fact == '$')
        return "not set";
    return strncmp(fact, "finding ", 8) == 0 ? "no" : "not there";
}

/* --- comparing --- */

/* Is the fact implied by the node having none of its kind? */
static bool is_implied(const json_t *flat, const char *fact)
{
    const char *all = strncmp(fact, "NIC ", 4) == 0 ? ALL_NICS : *fact == '$' ? ALL_VARIABLES : NULL;
    const char *value = all ? json_string_value(json_object_get(flat, all)) : NULL;

    return value && strcmp(value, all[0] == 'N' ? NO_NIC : NO_VARIABLE) == 0;
}

/* Adds a node to the row with the same values under `keys` (ends with NULL), which is created if there is none. */
static void add_node(json_t *rows, json_t *values, const char *const *keys, const char *node)
{
    json_t *row = NULL;

    for (size_t i = 0; i < json_array_size(rows) && !row; i++) {
        row = json_array_get(rows, i);
        for (const char *const *key = keys; *key && row; key++)
            if (!json_equal(json_object_get(row, *key), json_object_get(values, *key)))
                row = NULL;
    }
    if (!row) {
        row = values;
        json_object_set_new(row, "nodes", json_array());
        json_array_append(rows, row);
    }
    json_array_append_new(json_object_get(row, "nodes"), json_string(node));
    json_decref(values);
}

/* The values of one fact: an array of {"value", "nodes": [names]}, in order of appearance. */
static json_t *tally(const char *fact, const struct node *nodes, json_t *const *flats, int n)
{
    json_t *values = json_array();

    for (int i = 0; i < n; i++) {
        const char *value = flats[i] ? json_string_value(json_object_get(flats[i], fact)) : NULL;

        if (flats[i] && !is_implied(flats[i], fact))
            add_node(values, json_pack("{s:s}", "value", value ? value : missing(fact)), TEXTS("value"), nodes[i].name);
    }
    return values;
}

/* Splits the most common value (of several the first) from the others. */
static json_t *difference(const char *fact, json_t *values)
{
    size_t best = 0;
    json_t *row;

    for (size_t k = 1; k < json_array_size(values); k++)
        if (json_array_size(json_object_get(json_array_get(values, k), "nodes")) >
            json_array_size(json_object_get(json_array_get(values, best), "nodes")))
            best = k;
    row = json_pack("{s:s, s:O, s:i}", "fact", fact, "value", json_object_get(json_array_get(values, best), "value"),
                    "nodes", (int)json_array_size(json_object_get(json_array_get(values, best), "nodes")));
    json_array_remove(values, best);
    json_object_set(row, "others", values);
    return row;
}

/* The model of a node's GPUs: "8 x NVIDIA B200" without the number. */
static const char *kind_of(const json_t *flat)
{
    const char *gpus = json_string_value(json_object_get(flat, "GPUs"));
    size_t n = gpus ? strspn(gpus, "0123456789") : 0;

    return !gpus ? "" : n && strncmp(gpus + n, " x ", 3) == 0 ? gpus + n + 3 : gpus;
}

/* A node with other GPUs than most would differ in everything: that is one difference, and the only one. */
static void split_by_kind(const struct node *nodes, json_t **flats, int n, json_t *differences)
{
    json_t *others = json_array();
    int best = -1, n_best = 0;

    for (int i = 0; i < n; i++) {
        int alike = 0;

        for (int k = 0; flats[i] && k < n; k++)
            alike += flats[k] && strcmp(kind_of(flats[i]), kind_of(flats[k])) == 0;
        if (alike > n_best) {
            best = i;
            n_best = alike;
        }
    }
    for (int i = 0; i < n; i++) {
        char text[TEXT_BYTES + 64];

        if (!flats[i] || strcmp(kind_of(flats[i]), kind_of(flats[best])) == 0)
            continue;
        snprintf(text, sizeof(text), "%s%s; not compared further", json_string_value(json_object_get(flats[i], "GPUs")),
                 strcmp(json_string_value(json_object_get(flats[i], ALL_NICS)), NO_NIC) == 0 ? ", no NIC" : "");
        add_node(others, json_pack("{s:s}", "value", text), TEXTS("value"), nodes[i].name);
    }
    if (json_array_size(others)) {
        json_array_append_new(differences,
                              json_pack("{s:s, s:O, s:i, s:O}", "fact", "GPUs", "value",
                                        json_object_get(flats[best], "GPUs"), "nodes", n_best, "others", others));
        for (int i = 0; i < n; i++) {
            if (i == best || !flats[i] || strcmp(kind_of(flats[i]), kind_of(flats[best])) == 0)
                continue;
            json_decref(flats[i]);
            flats[i] = NULL;
        }
    }
    json_decref(others);
}

json_t *compare_nodes(const struct node *nodes, int n)
{
    json_t **flats = calloc((size_t)n + 1, sizeof(*flats)), *facts = json_object(), *differences = json_array(), *value;
    const char *fact;

    for (int i = 0; flats && i < n; i++) {
        if (!nodes[i].document)
            continue;
        flats[i] = flatten(nodes[i].document);
    }
    if (flats)
        split_by_kind(nodes, flats, n, differences);
    for (int i = 0; flats && i < n; i++) {
        json_object_foreach (flats[i], fact, value) {
            set(facts, fact, "");
        }
    }
    json_object_foreach (facts, fact, value) {
        json_t *values = flats ? tally(fact, nodes, flats, n) : json_array();

        if (json_array_size(values) > 1)
            json_array_append_new(differences, difference(fact, values));
        json_decref(values);
    }
    for (int i = 0; flats && i < n; i++)
        json_decref(flats[i]);
    free(flats);
    json_decref(facts);
    return differences;
}

json_t *compare_findings(const struct node *nodes, int n)
{
    json_t *findings = json_array();

    for (int i = 0; i < n; i++) {
        const json_t *checks = json_object_get(nodes[i].document, "checks");

        for (size_t c = 0; c < json_array_size(checks) && c < FACTS_MAX; c++) {
            const json_t *check = json_array_get(checks, c);
            char id[64], severity[32], text[TEXT_BYTES];

            if (!is_finding(check))
                continue;
            text_of(json_object_get(check, "id"), id, sizeof(id));
            text_of(json_object_get(check, "severity"), severity, sizeof(severity));
            text_of(json_object_get(check, "text"), text, sizeof(text));
            add_node(findings, json_pack("{s:s, s:s, s:s}", "severity", severity, "id", id, "text", text),
                     TEXTS("id", "text"), nodes[i].name);
        }
    }
    return findings;
}
