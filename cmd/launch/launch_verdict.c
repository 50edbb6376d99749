/* SPDX-License-Identifier: Apache-2.0 */
#include "launch_verdict.h"

#include "cmd/parse/log_input.h"
#include "common/output.h"

#include <string.h>

#define TOLERANCE 15 /* percent, as of epkit parse */

void launch_feed(void *parser, const char *prefix, const char *text, size_t bytes)
{
    parser_feed(parser, prefix, strlen(prefix));
    parser_feed(parser, text, bytes);
    parser_feed(parser, "\n", 1);
}

static int read_folder(const struct cmd *cmd, const char *path, struct parser *parser,
                       const struct reference *reference, struct verdict_options *options)
{
    struct folder *folder;
    char error[200];
    int code;

    if (!runfolder_open(path, &folder, error, sizeof(error))) {
        out_error("%s: %s: %s", cmd->name, path, error);
        return CMD_FAILED;
    }
    code = input_read_folder(cmd, parser, folder, reference, options);
    runfolder_free(folder);
    return code;
}

json_t *launch_parse(const struct cmd *cmd, const char *folder, struct parser *parser,
                     const struct launch_result *result, int *ret_code)
{
    const struct input_options none = {.tolerance = TOLERANCE};
    struct verdict_options options;
    struct reference *reference;
    enum verdict_result verdict;
    json_t *document = NULL, *whole;

    *ret_code = input_reference(cmd, &none, &reference, &options);
    if (*ret_code != CMD_FINE)
        return NULL;
    if (folder)
        *ret_code = read_folder(cmd, folder, parser, reference, &options);
    else
        input_know_run(result->document, reference, &options);
    if (*ret_code == CMD_FINE) {
        parser_end(parser);
        document = verdict_make(parser, reference, &options, &verdict);
        *ret_code = document ? input_exit_code(verdict) : CMD_FAILED;
    }
    reference_free(reference);
    if (!document)
        return NULL;
    whole = out_document("parse");
    json_object_update(whole, document);
    json_decref(document);
    return whole;
}
