/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes as a log: counts stay within each other, the verdict can be written as JSON, and it does not matter how the
 * bytes are cut into blocks.
 */
#include "cmd/parse/verdict.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(bool holds)
{
    if (!holds)
        abort();
}

static struct parser *parse(const uint8_t *data, size_t size, size_t block)
{
    struct parser *parser = parser_new();

    check(parser);
    parser_begin(parser, "fuzz");
    for (size_t at = 0; at < size; at += block)
        parser_feed(parser, (const char *)data + at, size - at < block ? size - at : block);
    parser_end(parser);
    return parser;
}

static char *verdict_of(const struct parser *parser, const struct reference *reference)
{
    struct verdict_options options = {.tolerance = 0.15};
    enum verdict_result result;
    json_t *document = verdict_make(parser, reference, &options, &result);
    char *text;

    check(document && json_is_string(json_object_get(document, "verdict")));
    check(result != VERDICT_NOTHING || parser_count(parser) == 0);
    text = json_dumps(document, JSON_COMPACT);
    check(text);
    json_decref(document);
    return text;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct reference *reference;
    struct parser *whole = parse(data, size, size ? size : 1), *pieces = parse(data, size, 7);
    struct parse_totals totals = parser_totals(whole);
    char *text, *again;

    if (!reference)
        reference = reference_new();
    check(reference);
    check(totals.bytes == size && totals.recognised <= totals.lines + size);
    for (size_t i = 0; i < parser_count(whole); i++) {
        const struct parse_run *run = parser_run(whole, i);

        check(run->writers >= 1 && run->n_measures <= PARSE_MAX_MEASURES && run->n_problems <= PARSE_MAX_PROBLEMS);
        check(run->first_line <= run->last_line);
        for (size_t j = 0; j < run->n_measures; j++)
            check(run->measures[j].n_points <= PARSE_MAX_POINTS);
    }
    text = verdict_of(whole, reference);
    again = verdict_of(pieces, reference);
    check(strcmp(text, again) == 0);
    free(text);
    free(again);
    parser_free(whole);
    parser_free(pieces);
    return 0;
}
