/* SPDX-License-Identifier: Apache-2.0 */
/* json.h - members of JSON objects from files and programs that may have any content. */
#ifndef EP_COMMON_JSON_H
#define EP_COMMON_JSON_H

#include <jansson.h>

/* The text of a member, or of an item of an array, borrowed; "" if there is none, or of another type. */
const char *json_text(const json_t *object, const char *key);
const char *json_text_at(const json_t *array, size_t i);

/* Each item of an array; none if it is of another type. */
#define FOR_JSON(item, array) for (size_t item##_at = 0; (item = json_array_get(array, item##_at)); item##_at++)

/* A number; 0 if there is none. The other: a whole number; 0 also for one that is beyond an int. */
double json_number(const json_t *object, const char *key);
int json_int(const json_t *object, const char *key);

#endif
