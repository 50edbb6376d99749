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

void json_copy_members(json_t *into, const json_t *from, const char *const *keys)
{
    for (; *keys; keys++) {
        json_t *value = json_object_get(from, *keys);

        json_object_set_new(into, *keys, value ? json_incref(value) : json_null());
    }
}
