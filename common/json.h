/* SPDX-License-Identifier: Apache-2.0 */
/* json.h - members of JSON objects from files and programs that may have any content. */
#ifndef EP_COMMON_JSON_H
#define EP_COMMON_JSON_H

#include <jansson.h>
#include <stdint.h>

/* The text of a member, or of an item of an array, borrowed; "" if there is none, or of another type. */
const char *json_text(const json_t *object, const char *key);
const char *json_text_at(const json_t *array, size_t i);

/* Each item of an array, each member of an object; none if it is of another type. */
#define FOR_JSON(item, array)                                                                                          \
    for (size_t item##_at = 0; item##_at != SIZE_MAX; item##_at = SIZE_MAX)                                            \
        for (json_t * item; (item = json_array_get(array, item##_at)); item##_at++)
#define FOR_MEMBERS(key, value, object)                                                                                \
    for (const char *key = json_object_iter_key(json_object_iter((json_t *)(object))); key; key = NULL)                \
        for (json_t * value; key && (value = json_object_iter_value(json_object_key_to_iter(key)));                    \
             key = json_object_iter_key(json_object_iter_next((json_t *)(object), json_object_key_to_iter(key))))

/* A number; 0 if there is none. The other: a whole number; 0 also for one that is beyond an int. */
double json_number(const json_t *object, const char *key);
int json_int(const json_t *object, const char *key);

#endif
