/* SPDX-License-Identifier: Apache-2.0 */
/*
 * redact.h - finds in a text the identifiers of a machine that have a form of their own (addresses, GUIDs and UUIDs),
 * and secrets: tokens by their form or because they look drawn at random, passwords and keys by the word or the option
 * in front of them.
 *
 * One table of recognisers (redact.c; those of secrets in secrets.c and secret_tokens.c). Names that people choose have
 * no such form.
 */
#ifndef EP_COMMON_REDACT_H
#define EP_COMMON_REDACT_H

#include "json.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum identifier_kind {
    IDENTIFIER_UUID,      /* with '-' or '_' between its groups */
    IDENTIFIER_UUID_PART, /* the beginning of a UUID after "GPU-" */
    IDENTIFIER_MAC,       /* of Ethernet, EUI-64, IP over InfiniBand; with ':', '-', '.' or after "enx" */
    IDENTIFIER_GUID,      /* four groups of four digits */
    IDENTIFIER_IPV4,      /* with '.', or with '-' after "ip-" */
    IDENTIFIER_IPV6,      /* GIDs as well */
    IDENTIFIER_SECRET     /* a token, a password, a private key */
};

struct identifier {
    enum identifier_kind kind;
    size_t before; /* bytes that introduce it: "GPU-", "ip-", "password=" */
    size_t bytes;
};

/* Is there an identifier at text[at]? `has_versions`: 12.8.0.38 after '-', '.' or a letter is a version. */
bool identifier_at(const char *text, size_t bytes, size_t at, bool has_versions, struct identifier *ret_identifier);

bool identifier_is_uuid(const char *text, size_t bytes);

/* The length of the IPv4 address at text[at] with `separator` between its numbers, and its value; 0 without one. */
size_t identifier_ipv4(const char *text, size_t bytes, size_t at, char separator, uint32_t *ret_address);

/* Does the name of an environment variable, in any case, say that its value is a secret? */
bool identifier_is_secret_name(const char *name);

/* Stands for a secret in what is written. */
#define REDACTED "(left out)"

/* The text with REDACTED for each secret in it, to be freed. */
char *redact_text(const char *text);

/*
 * A copy of the document without secrets, for what is printed and written. Secret are also the
 * values of variables with such names, in objects, as NAME=VALUE, as {"name", "value"}, and what follows an option such
 * as --password, or "mysql -p", in an array. The values of the variables that its member "kept_values" names stay.
 */
json_t *redact_document(const json_t *document);

#endif
