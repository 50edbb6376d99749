/* SPDX-License-Identifier: Apache-2.0 */
#include "launch/verdict.h"

#include "cmd.h"
#include "process/capture.h"

#include <sys/wait.h>

#define PARSE_MS 60000

/* In a process of its own: logs of many nodes may be large, and what a program wrote may be anything. */
json_t *launch_parse(const char *folder, int *ret_code)
{
    const char *argv[] = {"/proc/self/exe", "parse", "--json", folder, NULL};
    struct capture capture = {.argv = (char *const *)argv};
    json_t *document = NULL;

    *ret_code = CMD_FINE;
    if (!verb_find("parse") || capture_run(&capture, 1, 1, PARSE_MS, NULL, NULL) != 0)
        return NULL;
    if (!capture.start_error && !capture.late && WIFEXITED(capture.status) && capture.output.text)
        document = json_loadb(capture.output.text, capture.output.bytes, 0, NULL);
    if (document)
        *ret_code = WEXITSTATUS(capture.status);
    capture_done(&capture);
    return document;
}
