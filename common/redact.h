/* SPDX-License-Identifier: Apache-2.0 */
/*
 * redact.h - finds in a text what identifies a machine or a person, and what is secret.
 *
 * One table of recognisers (redact.c). It finds what has a form of its own, or a word in front that announces it;
 * names that people choose have neither.
 */
#ifndef EP_COMMON_REDACT_H
#define EP_COMMON_REDACT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum identifier_kind {
    IDENTIFIER_UUID = 1 << 0,      /* with '-' or '_' between its groups */
    IDENTIFIER_UUID_PART = 1 << 1, /* the beginning of a UUID after "GPU-" */
    IDENTIFIER_MAC = 1 << 2,       /* of Ethernet, EUI-64, IP over InfiniBand; with ':', '-', '.' or after "enx" */
    IDENTIFIER_GUID = 1 << 3,      /* four groups of four digits */
    IDENTIFIER_IPV4 = 1 << 4,      /* with '.', or with '-' after "ip-" */
    IDENTIFIER_IPV6 = 1 << 5,      /* GIDs as well */
    IDENTIFIER_HOST = 1 << 6,      /* a name with a domain, or the host of a URL */
    IDENTIFIER_MAIL = 1 << 7,      /* a mail address */
    IDENTIFIER_USER = 1 << 8,      /* user and password of a URL */
    IDENTIFIER_SECRET = 1 << 9,    /* keys, tokens and passwords */
    IDENTIFIER_NUMBER = 1 << 10    /* serial numbers, and runs of digits too long for anything else */
};

#define IDENTIFIERS_ALL ((1u << 11) - 1)
#define IDENTIFIERS_SECRET ((unsigned)IDENTIFIER_USER | IDENTIFIER_SECRET)
/* Added to kinds: the text names software, so 12.8.0.38 after '-', '.' or a letter is a version. */
#define IDENTIFIERS_VERSIONS (1u << 31)

struct identifier {
    enum identifier_kind kind;
    size_t before; /* bytes that introduce it: "password=", "ip-" */
    size_t bytes;  /* 0: what was introduced is none */
};

/* Is there an identifier of one of `kinds` at text[at], or something that introduces one? */
bool identifier_at(const char *text, size_t bytes, size_t at, unsigned kinds, struct identifier *ret_identifier);

bool identifier_is_uuid(const char *text, size_t bytes);

/* The length of the IPv4 address at text[at] with `separator` between its numbers, and its value; 0 without one. */
size_t identifier_ipv4(const char *text, size_t bytes, size_t at, char separator, uint32_t *ret_address);

/* Does the name of an environment variable, in any case, say that its value is a secret? */
bool identifier_is_secret_name(const char *name);

/* Is there a password in an address, "scheme://user:password@host"? */
bool identifier_has_password(const char *address);

#endif
