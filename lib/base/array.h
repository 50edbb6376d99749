/* SPDX-License-Identifier: Apache-2.0 */
/* array.h - walks and searches of arrays. */
#ifndef EP_BASE_ARRAY_H
#define EP_BASE_ARRAY_H

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* Each of the n elements of an array, which is not NULL unless n is 0, as a pointer. */
#define FOR_EACH(element, array, n)                                                                                    \
    for (__typeof__((array)[0]) *element = (array), *element##_end = (n) ? element + (n) : element;                    \
         element < element##_end; element++)

/* Of the numbers `i` from 0 to n - 1: how many meet the condition, whether any does, and the first; -1: none. */
#define COUNT_OF(i, n, condition)                                                                                      \
    ({                                                                                                                 \
        int i##_count = 0;                                                                                             \
        for (int i = 0; i < (int)(n); i++)                                                                             \
            i##_count += (condition) ? 1 : 0;                                                                          \
        i##_count;                                                                                                     \
    })
#define FIRST_OF(i, n, condition)                                                                                      \
    ({                                                                                                                 \
        int i = 0;                                                                                                     \
        while (i < (int)(n) && !(condition))                                                                           \
            i++;                                                                                                       \
        i < (int)(n) ? i : -1;                                                                                         \
    })
#define ANY_OF(i, n, condition) (FIRST_OF(i, n, condition) >= 0)

#endif
