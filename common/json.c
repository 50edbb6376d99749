/* SPDX-License-Identifier: Apache-2.0 */
#include "json.h"

const char *json_text(const json_t *object, const char *key)
{
    const char *text = json_string_value(json_object_get(object, key));

    return text ? text : "";
}

double json_number(const json_t *object, const char *key)
{
    return json_number_value(json_object_get(object, key));
}
