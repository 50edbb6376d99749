/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_resources.c - amounts of resources that the API server refuses. For a cluster read from a file, which has no
 * answers of the API server to this manifest.
 */
#include "deploy_check.h"

#include <stdio.h>
#include <stdlib.h>

#define DIGITS "0123456789"

static const char *const container_lists[] = {"initContainers", "containers", NULL};

/* A device, of a plugin: it is counted, and cannot be overcommitted. */
static bool is_extended(const char *resource)
{
    return strchr(resource, '/') && !strstr(resource, "kubernetes.io/");
}

/* Of these, a container may request less than its limit. */
static bool can_overcommit(const char *resource)
{
    return !is_extended(resource) && strncmp(resource, "hugepages-", 10) != 0;
}

/* What follows the number; NULL: there is none. */
static const char *find_unit(const char *text)
{
    const char *digits = text + (*text == '+' || *text == '-');
    size_t whole = strspn(digits, DIGITS), part = digits[whole] == '.' ? strspn(digits + whole + 1, DIGITS) : 0;

    return whole + part ? digits + whole + (digits[whole] == '.') + part : NULL;
}

/* A number, and a unit or an exponent. */
static bool is_quantity(const char *text)
{
    static const char *const units[] = {"",  "n",  "u",  "m",  "k",  "M",  "G",  "T", "P",
                                        "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei", NULL};
    const char *unit = find_unit(text), *digits;

    if (!unit)
        return false;
    for (size_t i = 0; units[i]; i++)
        if (strcmp(unit, units[i]) == 0)
            return true;
    digits = unit + 1 + (unit[1] == '+' || unit[1] == '-');
    return (*unit == 'e' || *unit == 'E') && *digits && strspn(digits, DIGITS) == strlen(digits);
}

/* Do its characters follow the pattern of quantities, though they are no unit? "10Mi5", "1K" */
static bool has_pattern(const char *text)
{
    const char *at = find_unit(text);

    if (!at)
        return false;
    at += strspn(at, "eEinumkKMGTP");
    at += *at == '+' || *at == '-';
    return at[strspn(at, DIGITS)] == '\0';
}

/* The value as the manifest has it. */
static void write_value(const json_t *value, char *ret_text, size_t bytes)
{
    char *text = json_is_string(value) ? NULL : json_dumps(value, JSON_ENCODE_ANY | JSON_REAL_PRECISION(12));

    snprintf(ret_text, bytes, "%s", json_is_string(value) ? json_string_value(value) : text ? text : "");
    free(text);
}

struct place {
    const char *list, *kind; /* "containers", "limits" */
    size_t number;
    const json_t *container;
};

static void add_amount(struct check *check, const struct place *place, const char *resource, struct check_text *text)
{
    char object[320];

    CHECK_FORMAT(object, "%.120s: %.120s", get_text(place->container, "name"), resource);
    check_add(check, CHECK_ERROR, "amount", "the API server", object, text);
}

static void check_amount(struct check *check, const struct place *place, const char *resource, const json_t *value)
{
    long long amount = get_quantity(value);
    struct check_text text = {0};
    char written[64];

    write_value(value, written, sizeof(written));
    if (!json_is_number(value) && !json_is_null(value) && (!json_is_string(value) || !is_quantity(written))) {
        CHECK_FORMAT(text.says, "%s",
                     has_pattern(written) ? "unable to parse quantity's suffix"
                                          : "quantities must match the regular expression "
                                            "'^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'");
        CHECK_FORMAT(text.why, "spec.%s[%zu].resources.%s: %.120s is '%s'", place->list, place->number, place->kind,
                     resource, written);
        CHECK_FORMAT(text.fix, "write a number with a unit like m, M, G, Mi or Gi, or without one");
    } else if (*written == '-') {
        CHECK_FORMAT(text.says,
                     "spec.%s[%zu].resources.%s[%.120s]: Invalid value: \"%s\": must be greater than or equal to 0",
                     place->list, place->number, place->kind, resource, written);
        CHECK_FORMAT(text.why, "the amount is negative");
        CHECK_FORMAT(text.fix, "write a number that is not negative");
    } else if (is_extended(resource) && amount % 1000 != 0) {
        CHECK_FORMAT(text.says, "spec.%s[%zu].resources.%s[%.120s]: Invalid value: \"%s\": must be an integer",
                     place->list, place->number, place->kind, resource, written);
        CHECK_FORMAT(text.why, "devices are given to a container whole");
        CHECK_FORMAT(text.fix, "write a whole number");
    } else {
        return;
    }
    add_amount(check, place, resource, &text);
}

/* Requests are at most their limits; of devices and huge pages equal to them. */
static void check_request(struct check *check, const struct place *place, const char *resource, const json_t *request)
{
    const json_t *limit = get_key(get(place->container, "resources/limits"), resource);
    bool is_free = can_overcommit(resource);
    long long most = get_quantity(limit), amount = get_quantity(request);
    struct check_text text = {0};
    char written[2][64];

    /* An amount that cannot be read is a finding of its own. */
    if (amount < 0 || (limit && most < 0) || (limit && amount == most) || (is_free && (!limit || amount < most)))
        return;
    write_value(request, written[0], sizeof(written[0]));
    if (limit) {
        write_value(limit, written[1], sizeof(written[1]));
        CHECK_FORMAT(text.says, "spec.%s[%zu].resources.requests: Invalid value: \"%s\": must be %s %.120s limit of %s",
                     place->list, place->number, written[0], is_free ? "less than or equal to" : "equal to", resource,
                     written[1]);
    } else {
        CHECK_FORMAT(text.says,
                     "spec.%s[%zu].resources.limits: Required value: Limit must be set for non overcommitable "
                     "resources",
                     place->list, place->number);
    }
    CHECK_FORMAT(text.why,
                 is_free
                     ? "the request of %.120s is above its limit"
                     : "devices and huge pages cannot be overcommitted: the request of %.120s has to equal its limit",
                 resource);
    CHECK_FORMAT(text.fix,
                 is_free ? "raise the limit of %.120s to %s at least, or lower the request"
                         : "resources: {limits: {%.120s: %s}}; without a request the limit is the request",
                 resource, written[0]);
    add_amount(check, place, resource, &text);
}

void check_resources(struct check *check, const struct deploy_job *job)
{
    static const char *const kinds[] = {"limits", "requests"};
    const char *resource;
    json_t *value;

    for (int s = 0; s < job->n_sets; s++)
        for (size_t n = 0; container_lists[n]; n++) {
            struct place place = {.list = container_lists[n]};

            json_array_foreach(get_key(job->sets[s].spec, container_lists[n]), place.number,
                               place.container) for (size_t k = 0; k < 2; k++)
                json_object_foreach((json_t *)get_key(get_key(place.container, "resources"), kinds[k]), resource, value)
            {
                place.kind = kinds[k];
                check_amount(check, &place, resource, value);
                if (k == 1)
                    check_request(check, &place, resource, value);
            }
        }
}
