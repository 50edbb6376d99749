/* SPDX-License-Identifier: Apache-2.0 */
/*
 * metadata_server.c - queries the metadata server of Google Compute Engine, through libcurl.
 *
 * libcurl is loaded on demand: it pulls in some twenty libraries, which a run without a metadata server does not need.
 */
#include "location.h"

#include <curl/curl.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define ATTRIBUTE "computeMetadata/v1/instance/attributes/physical_host"

struct curl_calls {
    CURL *(*init)(void);
    CURLcode (*setopt)(CURL *handle, CURLoption option, ...);
    CURLcode (*perform)(CURL *handle);
    CURLcode (*getinfo)(CURL *handle, CURLINFO info, ...);
    void (*cleanup)(CURL *handle);
    const char *(*strerror)(CURLcode code);
    struct curl_slist *(*append)(struct curl_slist *list, const char *text);
    void (*free_all)(struct curl_slist *list);
};

static bool load(struct curl_calls *ret_calls)
{
    static const char *const files[] = {"libcurl.so.4", "libcurl-gnutls.so.4", "libcurl-nss.so.4"};
    void *library = NULL;

    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]) && !library; i++)
        library = dlopen(files[i], RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return false;
    *(void **)&ret_calls->init = dlsym(library, "curl_easy_init");
    *(void **)&ret_calls->setopt = dlsym(library, "curl_easy_setopt");
    *(void **)&ret_calls->perform = dlsym(library, "curl_easy_perform");
    *(void **)&ret_calls->getinfo = dlsym(library, "curl_easy_getinfo");
    *(void **)&ret_calls->cleanup = dlsym(library, "curl_easy_cleanup");
    *(void **)&ret_calls->strerror = dlsym(library, "curl_easy_strerror");
    *(void **)&ret_calls->append = dlsym(library, "curl_slist_append");
    *(void **)&ret_calls->free_all = dlsym(library, "curl_slist_free_all");
    return ret_calls->init && ret_calls->setopt && ret_calls->perform && ret_calls->getinfo && ret_calls->cleanup &&
           ret_calls->strerror && ret_calls->append && ret_calls->free_all;
}

struct body {
    char text[4096];
    size_t bytes;
};

/* An answer that does not fit is refused: a location is short. */
static size_t store_body(char *data, size_t size, size_t n, void *context)
{
    struct body *body = context;

    if (body->bytes + size * n >= sizeof(body->text))
        return 0;
    memcpy(body->text + body->bytes, data, size * n);
    body->bytes += size * n;
    body->text[body->bytes] = '\0';
    return size * n;
}

static bool check_answer(const char *url, long http, struct body *body, char *ret_location, char *ret_why, size_t bytes)
{
    if (http != 200) {
        snprintf(ret_why, bytes, "%s: HTTP status %ld", url, http);
        return false;
    }
    body->text[strcspn(body->text, "\r\n")] = '\0';
    if (!*body->text) {
        snprintf(ret_why, bytes, "%s: the answer is empty", url);
        return false;
    }
    if (!location_is_valid(body->text)) {
        snprintf(ret_why, bytes, "%s: the answer is not a location", url);
        return false;
    }
    memcpy(ret_location, body->text, strlen(body->text) + 1);
    return true;
}

bool metadata_physical_host(const char *server, char ret_location[LOCATION_BYTES], char *ret_why, size_t bytes)
{
    struct curl_calls calls = {0};
    struct curl_slist *headers;
    struct body body = {.bytes = 0};
    bool is_found = false;
    char url[512];
    CURLcode code;
    long http = 0;
    CURL *handle;

    snprintf(url, sizeof(url), "http://%.300s/%s", server, ATTRIBUTE);
    if (!load(&calls)) {
        snprintf(ret_why, bytes, "libcurl.so.4, which queries the metadata server, is not installed");
        return false;
    }
    handle = calls.init();
    headers = calls.append(NULL, "Metadata-Flavor: Google");
    if (!handle || !headers) {
        snprintf(ret_why, bytes, "no memory for libcurl");
        goto done;
    }
    calls.setopt(handle, CURLOPT_URL, url);
    calls.setopt(handle, CURLOPT_HTTPHEADER, headers);
    calls.setopt(handle, CURLOPT_PROXY, "");
    calls.setopt(handle, CURLOPT_NOSIGNAL, 1L);
    calls.setopt(handle, CURLOPT_TIMEOUT_MS, LOCATION_SECONDS * 1000L);
    calls.setopt(handle, CURLOPT_WRITEFUNCTION, store_body);
    calls.setopt(handle, CURLOPT_WRITEDATA, &body);
    code = calls.perform(handle);
    calls.getinfo(handle, CURLINFO_RESPONSE_CODE, &http);
    if (code != CURLE_OK)
        snprintf(ret_why, bytes, "%s: %s", url, calls.strerror(code));
    else
        is_found = check_answer(url, http, &body, ret_location, ret_why, bytes);
done:
    if (headers)
        calls.free_all(headers);
    if (handle)
        calls.cleanup(handle);
    return is_found;
}
