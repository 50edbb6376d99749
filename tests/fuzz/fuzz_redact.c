/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes as a text, and as a document if they are JSON: what is found is within the text, a secret on the line after
 * it is left out whatever the text is, and what was redacted stays as it is.
 */
#include "common/redact.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Of a token, which its form shows, and a password, which its name does. */
#define TOKEN_BODY "Zy9Xw7Vu5Ts3Rq1Po2Nm4Lk6Ji8Hg0FeDc"
#define PASSWORD "Pq9zY8xW7vU6t"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(bool holds)
{
    if (!holds)
        abort();
}

static void check_text(const char *text)
{
    size_t bytes = strlen(text);
    struct identifier found;
    char *longer, *shown, *again;

    for (size_t at = 0; at < bytes; at++)
        for (int has_versions = 0; has_versions < 2; has_versions++)
            if (identifier_at(text, bytes, at, has_versions, &found))
                check(found.bytes > 0 && found.before + found.bytes <= bytes - at);
    check(asprintf(&longer, "%s\nhf_%s\n", text, TOKEN_BODY) > 0);
    shown = redact_text(longer);
    check(shown && !strstr(shown, TOKEN_BODY));
    again = redact_text(shown);
    check(again && !strstr(again, TOKEN_BODY));
    free(again);
    free(shown);
    free(longer);
}

/* What is beside a secret in a document does not matter. */
static void check_document(json_t *beside)
{
    json_t *document = json_pack("{s:o, s:[s, s, s], s:{s:s, s:s}, s:[{s:s, s:s}]}", "beside", beside, "argv", "x",
                                 "--password", PASSWORD, "environment", "DB_PASSWORD", PASSWORD, "HF_HOME", "/x", "env",
                                 "name", "DB_PASSWORD", "value", PASSWORD),
           *shown = redact_document(document);
    char *text = shown ? json_dumps(shown, JSON_COMPACT) : NULL;

    check(text && !strstr(text, PASSWORD) && json_array_size(json_object_get(shown, "argv")) == 3);
    check(json_typeof(json_object_get(shown, "beside")) == json_typeof(beside));
    free(text);
    json_decref(shown);
    json_decref(document);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = malloc(size + 1);
    json_t *value;

    check(text);
    memcpy(text, data, size);
    text[size] = '\0';
    if (!strstr(text, TOKEN_BODY))
        check_text(text);
    if (!strstr(text, PASSWORD)) {
        value = json_loadb((const char *)data, size, JSON_DECODE_ANY, NULL);
        check_document(value ? value : json_stringn((const char *)data, size) ?: json_null());
    }
    free(text);
    return 0;
}
