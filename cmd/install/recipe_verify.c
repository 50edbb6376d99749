/* SPDX-License-Identifier: Apache-2.0 */
/* recipe_verify.c - runs the recipe's own tests. */
#include "base/error.h"
#include "install.h"

#include "common/clean.h"

#include <regex.h>
#include <stdlib.h>
#include <string.h>

#define VERIFY_SECONDS 120
#define OUTPUT_BYTES 65536

static bool matches(const char *pattern, const char *output)
{
    regex_t regex;
    bool found;

    if (regcomp(&regex, pattern, REG_EXTENDED | REG_NOSUB | REG_NEWLINE) != 0)
        return false;
    found = regexec(&regex, output, 0, NULL, 0) == 0;
    regfree(&regex);
    return found;
}

/* The first line that is not empty, for the report. */
static void first_line_of(const char *output, char ret_text[256])
{
    char line[256];

    while (*output == '\n' || *output == ' ')
        output++;
    snprintf(line, sizeof(line), "%.*s", (int)strcspn(output, "\n"), output);
    text_clean(line, ret_text, 256);
}

enum install_result install_verify(struct install *install, struct verify_result *ret_results, size_t max,
                                   size_t *ret_n)
{
    char *output = malloc(OUTPUT_BYTES);
    size_t n = 0;
    bool passed = true, is_interrupted = false;

    if (!output)
        return INSTALL_FAILED;
    for (size_t i = 0; i < install->recipe->n_steps && !is_interrupted; i++) {
        const struct recipe_step *step = &install->recipe->steps[install->recipe->order[i]];

        for (size_t k = 0; k < step->n_verify && n < max && !step->skipped && !is_interrupted; k++) {
            struct verify_result *result = &ret_results[n++];
            int status;

            result->step = step;
            result->verify = &step->verify[k];
            observe_begin(install->recipe, step, PHASE_VERIFY, "");
            status = run_probe(install, step, result->verify->run, VERIFY_SECONDS, output, OUTPUT_BYTES);
            first_line_of(output, result->text);
            result->passed = status == 0;
            if (status == 0 && !matches(result->verify->expect, output)) {
                result->passed = false;
                snprintf(result->text, sizeof(result->text), "its output does not match %.150s",
                         result->verify->expect);
            } else if (status < 0) {
                snprintf(result->text, sizeof(result->text), "no answer within %d s", VERIFY_SECONDS);
            } else if (status != 0 && !*result->text) {
                snprintf(result->text, sizeof(result->text), "exit status %d", status);
            }
            passed = passed && result->passed;
            is_interrupted = observe_is_interrupted();
        }
    }
    free(output);
    *ret_n = n;
    if (is_interrupted)
        return INSTALL_INTERRUPTED;
    return passed ? INSTALL_FINE : INSTALL_FAILED;
}
