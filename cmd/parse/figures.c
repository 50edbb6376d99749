/* SPDX-License-Identifier: Apache-2.0 */
#include "figures.h"

#include "common/embedded.h"
#include "common/memory.h"
#include "common/text.h"

#include <ctype.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

extern const struct embedded reference_builtin[];

/* The location of an error in a file. */
struct report {
    char *text;
    size_t bytes;
    const char *list;
    size_t index;
};

static bool refuse(const struct report *report, const char *key, const char *why)
{
    snprintf(report->text, report->bytes, "%s[%zu].%s %s", report->list, report->index, key, why);
    return false;
}

static bool read_text(const struct report *report, const json_t *object, const char *key, bool is_needed,
                      char *ret_text, size_t bytes)
{
    const json_t *value = json_object_get(object, key);

    *ret_text = '\0';
    if (!value && !is_needed)
        return true;
    if (!json_is_string(value))
        return refuse(report, key, "is not a string");
    if (strlen(json_string_value(value)) >= bytes)
        return refuse(report, key, "is too long");
    memcpy(ret_text, json_string_value(value), strlen(json_string_value(value)) + 1);
    return true;
}

static bool read_number(const struct report *report, const json_t *object, const char *key, double low, double high,
                        double *ret_number)
{
    const json_t *value = json_object_get(object, key);

    if (!json_is_number(value))
        return refuse(report, key, "is not a number");
    *ret_number = json_number_value(value);
    if (*ret_number < low || *ret_number > high)
        return refuse(report, key, "is out of range");
    return true;
}

static bool read_count(const struct report *report, const json_t *object, const char *key, int low, int *ret_count)
{
    const json_t *value = json_object_get(object, key);

    if (!json_is_integer(value) || json_integer_value(value) < low || json_integer_value(value) > 1000000)
        return refuse(report, key, "is not a whole number in range");
    *ret_count = (int)json_integer_value(value);
    return true;
}

static bool read_range(const struct report *report, const json_t *object, const char *key,
                       struct reference_range *ret_range)
{
    const json_t *value = json_object_get(object, key);

    *ret_range = (struct reference_range){0};
    if (!value)
        return true;
    if (!json_is_array(value) || json_array_size(value) != 2 || !json_is_number(json_array_get(value, 0)) ||
        !json_is_number(json_array_get(value, 1)))
        return refuse(report, key, "is not [low, high]");
    ret_range->low = json_number_value(json_array_get(value, 0));
    ret_range->high = json_number_value(json_array_get(value, 1));
    if (ret_range->low <= 0 || ret_range->high < ret_range->low)
        return refuse(report, key, "is not [low, high] with 0 < low <= high");
    return true;
}

static bool read_hardware(const struct report *report, const json_t *item, struct reference_hardware *ret_hardware)
{
    struct model_hardware *hardware = &ret_hardware->public;
    const json_t *match = json_object_get(item, "match");

    *ret_hardware = (struct reference_hardware){0};
    for (size_t i = 0; i < json_array_size(match) && ret_hardware->n_match < COUNT(ret_hardware->match); i++) {
        const char *text = json_string_value(json_array_get(match, i));

        if (!text || !*text)
            return refuse(report, "match", "has an element that is not a name");
        snprintf(ret_hardware->match[ret_hardware->n_match++], MODEL_NAME, "%s", text);
    }
    return read_text(report, item, "name", true, hardware->name, sizeof(hardware->name)) &&
           read_text(report, item, "title", true, hardware->title, sizeof(hardware->title)) &&
           read_count(report, item, "gpus_per_node", 1, &hardware->gpus_per_node) &&
           read_count(report, item, "nics_per_node", 0, &hardware->nics_per_node) &&
           read_number(report, item, "nic_gbps", 0, 1e5, &hardware->nic_gbps) &&
           read_number(report, item, "nvlink_gbps", 0.1, 1e5, &hardware->nvlink_gbps) &&
           read_number(report, item, "nic_efficiency", 0.01, 1, &hardware->nic_efficiency) &&
           read_number(report, item, "nvlink_dispatch_efficiency", 0.01, 1, &hardware->nvlink_dispatch_efficiency) &&
           read_number(report, item, "nvlink_combine_efficiency", 0.01, 1, &hardware->nvlink_combine_efficiency) &&
           read_number(report, item, "overhead_intranode_us", 0, 1e6, &hardware->overhead_intranode_us) &&
           read_number(report, item, "overhead_internode_us", 0, 1e6, &hardware->overhead_internode_us);
}

static bool read_figure(const struct report *report, const json_t *item, struct reference_figure *ret_figure)
{
    struct reference_figure *figure = ret_figure;

    *figure = (struct reference_figure){0};
    if (!read_text(report, item, "hardware", true, figure->hardware, sizeof(figure->hardware)) ||
        !read_text(report, item, "dialect", true, figure->dialect, sizeof(figure->dialect)) ||
        !read_text(report, item, "op", true, figure->op, sizeof(figure->op)) ||
        !read_text(report, item, "type", false, figure->type, sizeof(figure->type)) ||
        !read_text(report, item, "source", true, figure->source, sizeof(figure->source)) ||
        !read_count(report, item, "nodes", 1, &figure->nodes) ||
        (json_object_get(item, "ranks") && !read_count(report, item, "ranks", 1, &figure->ranks)) ||
        (json_object_get(item, "tokens") && !read_number(report, item, "tokens", 1, 1e9, &figure->tokens)) ||
        (json_object_get(item, "bytes") && !read_number(report, item, "bytes", 1, 1e15, &figure->bytes)) ||
        !read_range(report, item, "rdma", &figure->rdma) || !read_range(report, item, "nvl", &figure->nvl) ||
        !read_range(report, item, "busbw", &figure->busbw) || !read_range(report, item, "time_us", &figure->time_us))
        return false;
    if (figure->rdma.low <= 0 && figure->nvl.low <= 0 && figure->busbw.low <= 0 && figure->time_us.low <= 0)
        return refuse(report, "rdma", "and nvl, busbw, time_us are all missing");
    return true;
}

static bool is_same_figure(const void *x, const void *y)
{
    const struct reference_figure *a = x, *b = y;

    return strcmp(a->hardware, b->hardware) == 0 && strcmp(a->dialect, b->dialect) == 0 && strcmp(a->op, b->op) == 0 &&
           strcmp(a->type, b->type) == 0 && a->nodes == b->nodes && a->ranks == b->ranks && a->tokens == b->tokens;
}

static bool is_same_hardware(const void *a, const void *b)
{
    return strcmp(((const struct reference_hardware *)a)->public.name,
                  ((const struct reference_hardware *)b)->public.name) == 0;
}

/* The list with the entry, which replaces one that is the same. */
static void *put(void *list, size_t *n, const void *entry, size_t bytes, bool (*is_same)(const void *, const void *))
{
    size_t i = 0;

    while (i < *n && !is_same((char *)list + i * bytes, entry))
        i++;
    if (i == *n)
        list = memory_grow(list, ++*n * bytes);
    memcpy((char *)list + i * bytes, entry, bytes);
    return list;
}

static bool add_document(struct reference *reference, const json_t *document, char *ret_error, size_t bytes)
{
    struct report at = {.text = ret_error, .bytes = bytes, .list = "hardware"}, *report = &at;
    json_t *item;

    if (!json_is_object(document) || json_integer_value(json_object_get(document, "schema_version")) != 1) {
        snprintf(ret_error, bytes, "it is not reference data: schema_version 1 is missing");
        return false;
    }
    if (!json_is_array(json_object_get(document, "hardware")) && !json_is_array(json_object_get(document, "figures"))) {
        snprintf(ret_error, bytes, "it holds neither a list 'hardware' nor a list 'figures'");
        return false;
    }
    for (size_t i = 0; (item = json_array_get(json_object_get(document, "hardware"), i)); i++) {
        struct reference_hardware hardware;

        report->index = i;
        if (!read_hardware(report, item, &hardware))
            return false;
        reference->hardware =
            put(reference->hardware, &reference->n_hardware, &hardware, sizeof(hardware), is_same_hardware);
    }
    report->list = "figures";
    for (size_t i = 0; (item = json_array_get(json_object_get(document, "figures"), i)); i++) {
        struct reference_figure figure;

        report->index = i;
        if (!read_figure(report, item, &figure))
            return false;
        reference->figures = put(reference->figures, &reference->n_figures, &figure, sizeof(figure), is_same_figure);
    }
    return true;
}

bool reference_add(struct reference *reference, FILE *stream, char *ret_error, size_t bytes)
{
    json_error_t error;
    json_t *document = json_loadf(stream, JSON_REJECT_DUPLICATES, &error);
    bool good;

    if (!document) {
        snprintf(ret_error, bytes, "%s (line %d)", error.text, error.line);
        return false;
    }
    good = add_document(reference, document, ret_error, bytes);
    json_decref(document);
    return good;
}

struct reference *reference_new(void)
{
    struct reference *reference = memory_new(1, sizeof(*reference));
    json_t *document = json_loadb(reference_builtin[0].text, reference_builtin[0].bytes, 0, NULL);
    char error[200];

    (void)add_document(reference, document, error, sizeof(error));
    json_decref(document);
    return reference;
}

void reference_free(struct reference *reference)
{
    if (!reference)
        return;
    free(reference->hardware);
    free(reference->figures);
    free(reference);
}

/* "NVIDIA H100 80GB HBM3" holds "H100" as a word; "GB200" does not hold "B200". */
static bool holds_word(const char *text, const char *word)
{
    for (const char *at = text; (at = strcasestr(at, word)) != NULL; at++) {
        char after = at[strlen(word)];

        if ((at == text || !isalnum((unsigned char)at[-1])) && !isalnum((unsigned char)after))
            return true;
    }
    return false;
}

const struct model_hardware *reference_find_hardware(const struct reference *reference, const char *name)
{
    for (size_t i = 0; i < reference->n_hardware; i++)
        if (strcasecmp(reference->hardware[i].public.name, name) == 0)
            return &reference->hardware[i].public;
    for (size_t i = 0; i < reference->n_hardware; i++)
        for (size_t j = 0; j < reference->hardware[i].n_match; j++)
            if (holds_word(name, reference->hardware[i].match[j]))
                return &reference->hardware[i].public;
    return NULL;
}

const struct reference_figure *reference_find(const struct reference *reference, const char *hardware,
                                              const char *dialect, const char *op, const char *type, int nodes,
                                              int ranks, double tokens)
{
    const struct reference_figure *best = NULL;
    double best_off = INFINITY;

    FOR_EACH (figure, reference->figures, reference->n_figures) {
        double off = tokens > 0 && figure->tokens > 0 ? fabs(log(tokens / figure->tokens)) : 0;

        if (strcmp(figure->hardware, hardware) != 0 || strcmp(figure->dialect, dialect) != 0 ||
            strcmp(figure->op, op) != 0 || strcmp(figure->type, type) != 0 || figure->nodes != nodes ||
            (figure->ranks > 0 && ranks > 0 && figure->ranks != ranks))
            continue;
        if (off < best_off) {
            best = figure;
            best_off = off;
        }
    }
    return best;
}
