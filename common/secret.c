/* SPDX-License-Identifier: Apache-2.0 */
#include "secret.h"

#include <string.h>
#include <strings.h>

bool secret_is_name(const char *name)
{
    static const char *const words[] = {"TOKEN",      "SECRET",     "PASSW",   "PASSPHRASE", "PASSCODE",
                                        "PGPASS",     "CREDENTIAL", "PRIVATE", "API_KEY",    "APIKEY",
                                        "ACCESS_KEY", "AUTH",       "COOKIE",  "_PSK",       "MAGIC"};
    static const char *const ends[] = {"_KEY", "_PWD", "_PAT", "_PASS"};
    size_t length = strlen(name);

    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++)
        if (strcasestr(name, words[i]))
            return true;
    for (size_t i = 0; i < sizeof(ends) / sizeof(ends[0]); i++)
        if (length > strlen(ends[i]) && strcasecmp(name + length - strlen(ends[i]), ends[i]) == 0)
            return true;
    return strcasecmp(name, "PASS") == 0;
}

bool secret_is_in_address(const char *value)
{
    for (const char *at = value; (at = strstr(at, "://")) != NULL;) {
        size_t name, length;

        at += 3;
        name = strcspn(at, ":@/ ");
        if (at[name] != ':')
            continue;
        length = strcspn(at + name + 1, "@/ ");
        if (length && at[name + 1 + length] == '@')
            return true;
    }
    return false;
}
