/* SPDX-License-Identifier: Apache-2.0 */
#include "json.h"

#include <limits.h>

const char *json_text(const json_t *object, const char *key)
{
    const char *text = json_string_value(json_object_get(object, key));

    return text ? text : "";
}

const char *json_text_at(const json_t *array, size_t i)
{
    const char *text = json_string_value(json_array_get(array, i));

    return text ? text : "";
}

double json_number(const json_t *object, const char *key)
{
    return json_number_value(json_object_get(object, key));
}

int json_int(const json_t *object, const char *key)
{
    json_int_t value = json_integer_value(json_object_get(object, key));

    return value < INT_MIN || value > INT_MAX ? 0 : (int)value;
}
