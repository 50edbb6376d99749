/* SPDX-License-Identifier: Apache-2.0 */
/* compare_nodes.c - differences between nodes. Documents come from other machines: types of values are checked. */
#include "diagnosis.h"

#include "common/json.h"
#include "common/memory.h"
#include "common/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FACTS_MAX 4096 /* of all nodes together */
#define TEXT_BYTES 1024
#define NAME_BYTES 256

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

/* A string of a document, safe to print, of less than `bytes`, at most TEXT_BYTES; "" if it is not a string. */
static json_t *clean(const json_t *object, const char *key, size_t bytes)
{
    char text[TEXT_BYTES];

    text_clean(json_text(object, key), text, bytes);
    return json_string(text);
}

static void set(json_t *flat, const char *fact, const char *value)
{
    char text[TEXT_BYTES];

    text_clean(value, text, sizeof(text));
    if (json_object_size(flat) < FACTS_MAX)
        json_object_set_new(flat, fact, json_string(text));
}

/* The fact is called by a prefix and a name, of which less than `bytes` are kept, at most NAME_BYTES. */
static void set_named(json_t *flat, const char *prefix, const char *name, size_t bytes, const char *value)
{
    char kept[NAME_BYTES], fact[NAME_BYTES + 16];

    text_clean(name, kept, bytes);
    snprintf(fact, sizeof(fact), "%s%s", prefix, kept);
    set(flat, fact, value);
}

/* --- one document as {fact: text} --- */

static void flatten_gpus(json_t *flat, const json_t *gpus)
{
    size_t n = json_array_size(gpus);
    const json_t *first = json_array_get(gpus, 0);
    const char *name = json_is_string(first) ? json_string_value(first) : "";
    bool is_mixed = ANY_OF(i, n, !json_equal(json_array_get(gpus, (size_t)i), first));
    char text[TEXT_BYTES];

    if (is_mixed)
        snprintf(text, sizeof(text), "%zu, of several kinds (%.255s and others)", n, name);
    else
        snprintf(text, sizeof(text), "%zu x %.255s", n, name);
    set(flat, "GPUs", n ? text : "none");
}

static void flatten_nics(json_t *flat, const json_t *nics)
{
    set(flat, ALL_NICS, json_array_size(nics) ? "some" : NO_NIC);
    for (size_t i = 0; i < json_array_size(nics); i++) {
        const json_t *nic = json_array_get(nics, i);
        const char *firmware = json_text(nic, "firmware");
        char text[TEXT_BYTES];

        snprintf(text, sizeof(text), "%.63s, %g Gb/s, %.63s, %.63s, firmware %.63s", json_text(nic, "state"),
                 json_number_value(json_object_get(nic, "rate_gbps")), json_text(nic, "link_layer"),
                 json_text(nic, "role"), *firmware ? firmware : "unknown");
        set_named(flat, "NIC ", json_text(nic, "name"), 128, text);
    }
}

static bool is_finding(const json_t *check)
{
    return strcmp(json_text(check, "outcome"), "found") == 0;
}

static json_t *flatten(const json_t *document)
{
    json_t *flat = json_object(), *facts = json_object_get(document, "facts"),
           *environment = json_object_get(facts, "environment");
    const json_t *checks = json_object_get(document, "checks");

    set(flat, "epkit", json_text(document, "epkit"));
    for (size_t i = 0; i < COUNT(versions); i++) {
        const char *version = json_text(facts, versions[i][0]);

        set(flat, versions[i][1], *version ? version : "none");
    }
    flatten_gpus(flat, json_object_get(facts, "gpus"));
    flatten_nics(flat, json_object_get(facts, "nics"));
    set(flat, ALL_VARIABLES, json_object_size(environment) ? "set" : NO_VARIABLE);
    FOR_MEMBERS (name, value, environment)
        set_named(flat, "$", name, NAME_BYTES, json_is_string(value) ? json_string_value(value) : "");
    for (size_t i = 0; i < json_array_size(checks); i++)
        if (is_finding(json_array_get(checks, i)))
            set_named(flat, "finding ", json_text(json_array_get(checks, i), "id"), 64, "yes");
    return flat;
}

/* --- comparing --- */

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

/* Is the fact implied by the node having none of its kind, which is a fact of its own? */
static bool is_implied(const json_t *flat, const char *fact)
{
    if (*fact == '$')
        return strcmp(json_text(flat, ALL_VARIABLES), NO_VARIABLE) == 0;
    return text_begins(fact, "NIC ") && strcmp(json_text(flat, ALL_NICS), NO_NIC) == 0;
}

/* The values of one fact: an array of {"value", "nodes": [names]}, in order of appearance. */
static json_t *tally(const char *fact, const struct node *nodes, json_t *const *flats, int n)
{
    /* Of a node without this fact. */
    const char *missing = *fact == '$' ? "not set" : text_begins(fact, "finding ") ? "no" : "not there";
    json_t *values = json_array();

    for (int i = 0; i < n; i++) {
        const char *value = flats[i] ? json_string_value(json_object_get(flats[i], fact)) : NULL;

        if (flats[i] && !is_implied(flats[i], fact))
            add_node(values, json_pack("{s:s}", "value", value ? value : missing), TEXTS("value"), nodes[i].name);
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
    const char *gpus = json_text(flat, "GPUs");
    size_t n = strspn(gpus, "0123456789");

    return n && text_begins(gpus + n, " x ") ? gpus + n + 3 : gpus;
}

static bool are_alike(const json_t *a, const json_t *b)
{
    return a && b && strcmp(kind_of(a), kind_of(b)) == 0;
}

/* A node with other GPUs than most would differ in everything: that is one difference, and the only one. */
static void split_by_kind(const struct node *nodes, json_t **flats, int n, json_t *differences)
{
    json_t *others = json_array(), *most = NULL;
    int n_most = 0;

    for (int i = 0; i < n; i++) {
        int n_alike = COUNT_OF(k, n, are_alike(flats[i], flats[k]));

        if (n_alike > n_most) {
            most = flats[i];
            n_most = n_alike;
        }
    }
    for (int i = 0; i < n; i++) {
        char text[TEXT_BYTES + 64];

        if (!flats[i] || are_alike(flats[i], most))
            continue;
        snprintf(text, sizeof(text), "%s%s; not compared further", json_text(flats[i], "GPUs"),
                 strcmp(json_text(flats[i], ALL_NICS), NO_NIC) == 0 ? ", no NIC" : "");
        add_node(others, json_pack("{s:s}", "value", text), TEXTS("value"), nodes[i].name);
        json_decref(flats[i]);
        flats[i] = NULL;
    }
    if (json_array_size(others))
        json_array_append_new(differences, json_pack("{s:s, s:O, s:i, s:O}", "fact", "GPUs", "value",
                                                     json_object_get(most, "GPUs"), "nodes", n_most, "others", others));
    json_decref(others);
}

json_t *compare_nodes(const struct node *nodes, int n)
{
    json_t **flats = memory_new((size_t)n + 1, sizeof(*flats)), *facts = json_object(), *differences = json_array();

    for (int i = 0; i < n; i++)
        flats[i] = nodes[i].document ? flatten(nodes[i].document) : NULL;
    split_by_kind(nodes, flats, n, differences);
    for (int i = 0; i < n; i++)
        FOR_MEMBERS (fact, value, flats[i])
            if (json_object_size(facts) < FACTS_MAX)
                json_object_set(facts, fact, value);
    FOR_MEMBERS (fact, value, facts) {
        json_t *values = tally(fact, nodes, flats, n);

        if (json_array_size(values) > 1)
            json_array_append_new(differences, difference(fact, values));
        json_decref(values);
    }
    for (int i = 0; i < n; i++)
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

            if (is_finding(check))
                add_node(findings,
                         json_pack("{s:o, s:o, s:o}", "severity", clean(check, "severity", 32), "id",
                                   clean(check, "id", 64), "text", clean(check, "text", TEXT_BYTES)),
                         TEXTS("id", "text"), nodes[i].name);
        }
    }
    return findings;
}
