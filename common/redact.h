/* SPDX-License-Identifier: Apache-2.0 */
/*
 * redact.h - finds in a text the identifiers of a machine that have a form of their own: addresses, GUIDs and UUIDs.
 *
 * One table of recognisers (redact.c). Names that people choose and secrets have no such form.
 */
#ifndef EP_COMMON_REDACT_H
#define EP_COMMON_REDACT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum identifier_kind {
    IDENTIFIER_UUID,      /* with '-' or '_' between its groups */
    IDENTIFIER_UUID_PART, /* the beginning of a UUID after "GPU-" */
    IDENTIFIER_MAC,       /* of Ethernet, EUI-64, IP over InfiniBand; with ':', '-', '.' or after "enx" */
    IDENTIFIER_GUID,      /* four groups of four digits */
    IDENTIFIER_IPV4,      /* with '.', or with '-' after "ip-" */
    IDENTIFIER_IPV6       /* GIDs as well */
};

struct identifier {
    enum identifier_kind kind;
    size_t before; /* bytes that introduce it: "GPU-", "ip-" */
    size_t bytes;
};

/*
 * Is there an identifier at text[at], or something that introduces one? `has_versions`: the text names software, so
 * 12.8.0.38 after '-', '.' or a letter is a version.
 */
bool identifier_at(const char *text, size_t bytes, size_t at, bool has_versions, struct identifier *ret_identifier);

bool identifier_is_uuid(const char *text, size_t bytes);

/* The length of the IPv4 address at text[at] with `separator` between its numbers, and its value; 0 without one. */
size_t identifier_ipv4(const char *text, size_t bytes, size_t at, char separator, uint32_t *ret_address);

/* Does the name of an environment variable, in any case, say that its value is a secret? */
bool identifier_is_secret_name(const char *name);

/* Is there a password in an address, "scheme://user:password@host"? */
bool identifier_has_password(const char *address);

#endif
