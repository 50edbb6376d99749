/* SPDX-License-Identifier: Apache-2.0 */
/* check_pods.c - what the pods of a job refer to, each shown to be missing by one look-up; policies against ssh. */
#include "job_check.h"

#include "common/output.h"
#include "common/shell.h"

#include <stdlib.h>

/* --- look-ups --- */

/* A kind of object that has to be there: {name} and {space} stand for its name and the namespace of the job. */
struct missing {
    const char *resource, *id, *by, *says, *fix;
};

static const struct missing missing_space = {
    "namespaces", "namespace-missing", "the API server", "namespaces \"{name}\" not found",
    "use helm install --create-namespace, or: kubectl create namespace {name}"};
static const struct missing missing_secret = {"secrets", "secret-missing", "the kubelet", "secret \"{name}\" not found",
                                              "create the Secret {name} in namespace {space}"};
static const struct missing missing_claim = {"persistentvolumeclaims", "claim-missing", "the scheduler",
                                             "persistentvolumeclaim \"{name}\" not found",
                                             "create the claim in namespace {space}, or name another one"};
static const struct missing missing_driver = {
    "csidrivers", "csi-missing", "the kubelet", "driver name {name} not found in the list of registered CSI drivers",
    "install the CSI driver {name}; that of GCS FUSE: gcloud container clusters update CLUSTER "
    "--update-addons=GcsFuseCsiDriver=ENABLED"};
static const struct missing missing_class = {
    "deviceclasses", "device-class-missing", "the scheduler", "device class {name} does not exist",
    "install DRANET on the node pool (GKE 1.34.1-gke.1829001 and later), or set network.mode=multi"};
static const struct missing missing_network = {"networks", "network-missing", "the kubelet",
                                               "network \"{name}\" not found",
                                               "kubectl get networks, and set network.networks to the names there"};

#define UNSTARTED "the container is not started (CreateContainerConfigError)"
#define UNMOUNTED "pods stay in ContainerCreating: no driver can mount their volume"

/* Where names are: "[]" stands for each entry of a list. */
struct lookup {
    const char *path;
    const struct missing *missing;
    const char *why;
};

static const struct lookup pod_lookups[] = {
    {"initContainers[]/env[]/valueFrom/secretKeyRef/name", &missing_secret, UNSTARTED},
    {"initContainers[]/envFrom[]/secretRef/name", &missing_secret, UNSTARTED},
    {"containers[]/env[]/valueFrom/secretKeyRef/name", &missing_secret, UNSTARTED},
    {"containers[]/envFrom[]/secretRef/name", &missing_secret, UNSTARTED},
    {"volumes[]/persistentVolumeClaim/claimName", &missing_claim, "a pod waits for its volumes before it gets a node"},
    {"volumes[]/csi/driver", &missing_driver, UNMOUNTED},
    {"volumes[]/secret/secretName", &missing_secret, "pods stay in ContainerCreating"},
    {"imagePullSecrets[]/name", &missing_secret,
     "without it images are pulled anonymously, which fails for private ones"},
};

/* In the documents of a manifest. A request for devices of v1beta1 has the fields that v1 has below "exactly". */
#define NO_CLASS "the claim for NICs can not be satisfied: pods stay pending"
static const struct lookup document_lookups[] = {
    {"spec/spec/devices/requests[]/exactly/deviceClassName", &missing_class, NO_CLASS},
    {"spec/spec/devices/requests[]/deviceClassName", &missing_class, NO_CLASS},
    {"spec/devices/requests[]/exactly/deviceClassName", &missing_class, NO_CLASS},
    {"spec/devices/requests[]/deviceClassName", &missing_class, NO_CLASS},
    {"spec/csi/driver", &missing_driver, UNMOUNTED},
};

const char *shell_operand(const char *text, char *ret_word, size_t bytes)
{
    if (*text != '-')
        return shell_quote(text, ret_word, bytes);
    snprintf(ret_word, bytes, "-- ");
    shell_quote(text, ret_word + 3, bytes - 3);
    return ret_word;
}

/* In a fix, names are words of a command. */
static json_t *fill_in(const char *template, const char *name, const char *space, bool is_fix)
{
    char bytes[3 * SHELL_WORD_BYTES], word[SHELL_WORD_BYTES];
    struct text text = text_in(bytes, sizeof(bytes));

    while (*template) {
        size_t n = strcspn(template, "{");

        text_add(&text, "%.*s", (int)n, template);
        template += n;
        if (*template) {
            const char *value = text_begins(template, "{name}") ? name : space;

            text_add(&text, "%s", is_fix ? shell_operand(value, word, sizeof(word)) : value);
        }
        template += strcspn(template, "}") + (*template != '\0');
    }
    return out_text(bytes);
}

static void look_up(struct check *check, const struct missing *missing, const char *name, const char *why)
{
    const char *space = check->job->space;

    if (*name && check_knows(check, missing->resource) && !get_item(check->snapshot, missing->resource, space, name))
        check_add(check, CHECK_ERROR, missing->id, missing->by, name, fill_in(missing->says, name, space, false),
                  json_string(why), fill_in(missing->fix, name, space, true));
}

/* Looks up all names at the path, but not those that may be missing. */
static void look_up_all(struct check *check, const struct lookup *lookup, const json_t *from, const char *path)
{
    const char *list = strstr(path, "[]/"), *end = list ? list : strrchr(path, '/');
    char head[64];

    snprintf(head, sizeof(head), "%.*s", end ? (int)(end - path) : 0, path);
    if (!list) {
        if (!json_is_true(get(get(from, head), "optional")))
            look_up(check, lookup->missing, get_text(from, path), lookup->why);
        return;
    }
    FOR_JSON (entry, get(from, head))
        look_up_all(check, lookup, entry, list + strlen("[]/"));
}

/* --- images --- */

/* The repository, without tag or digest: access is granted per repository. */
static size_t repository_of(const char *image)
{
    const char *slash = strrchr(image, '/'), *end = strpbrk(slash ? slash : image, ":@");

    return end ? (size_t)(end - image) : strlen(image);
}

static void check_image(struct check *check, const char *image)
{
    static const char *const lists[] = {"status/initContainerStatuses", "status/containerStatuses"};
    size_t n = repository_of(image);

    FOR_JSON (pod, get_items(check->snapshot, "pods")) {
        for (size_t l = 0; l < COUNT(lists); l++)
            FOR_JSON (state, get(pod, lists[l])) {
                const char *reason = get_text(state, "state/waiting/reason"), *other = get_text(state, "image");

                if (!text_is_any(reason, TEXTS("ImagePullBackOff", "ErrImagePull")) || repository_of(other) != n ||
                    strncmp(other, image, n) != 0)
                    continue;
                check_add(
                    check, CHECK_ERROR, "image-pull", "the kubelet", image,
                    json_sprintf("ImagePullBackOff: %s", get_text(state, "state/waiting/message")),
                    json_sprintf("pod %s/%s cannot pull from that repository right now", get_space(pod), get_name(pod)),
                    json_string("give the nodes' service account roles/artifactregistry.reader on the "
                                "repository, or name a Secret in workload.imagePullSecrets"));
                return;
            }
    }
}

/* --- networks --- */

#define INTERFACES "networking.gke.io/interfaces"
#define DEFAULT_INTERFACE "networking.gke.io/default-interface"

/* The agent of GKE's data plane refuses a pod without a default interface that is in the list. */
static void check_interfaces(struct check *check, const json_t *interfaces, const char *standard,
                             const json_error_t *error)
{
    json_t *says, *why, *fix;

    if (json_is_array(interfaces) && *standard && get_entry(interfaces, "interfaceName", standard))
        return;
    if (!json_is_array(interfaces)) {
        says = json_sprintf("failed to parse interface annotation: %s", interfaces ? "it is not a list" : error->text);
        why = interfaces ? json_string("the annotation " INTERFACES " has to be a list in JSON")
                         : json_sprintf("the annotation " INTERFACES " is not JSON: line %d, column %d of it",
                                        error->line, error->column);
        fix = json_string("write [{\"interfaceName\":\"eth0\",\"network\":\"default\"}, ...], without a comma at the "
                          "end");
    } else if (!*standard) {
        says = json_string("default interface must be specified for multi-nic pod");
        why = json_string("the pods have the annotation " INTERFACES " without " DEFAULT_INTERFACE);
        fix = json_string("add the annotation " DEFAULT_INTERFACE ": eth0");
    } else {
        says = json_sprintf("default interface \"%s\" must be referenced in the interface annotation", standard);
        why = json_string("no entry of " INTERFACES " has this interfaceName");
        fix = json_string("add an entry with this interfaceName and \"network\":\"default\" to the list");
    }
    check_add(check, CHECK_ERROR, "network-annotation", "the kubelet", INTERFACES, says ? says : out_text(error->text),
              why, fix);
}

static void check_networks(struct check *check, const struct deploy_set *set)
{
    const json_t *annotations = get(set->metadata, "annotations");
    const char *list = get_string(json_object_get(annotations, INTERFACES));
    json_error_t error = {.line = 0};
    json_t *interfaces = json_loads(list, 0, &error);

    if (!*list)
        return;
    check_interfaces(check, interfaces, get_string(json_object_get(annotations, DEFAULT_INTERFACE)), &error);
    if (interfaces && !get_serves(check->snapshot, "networking.gke.io"))
        check_add(check, CHECK_WARNING, "multi-network", "nobody", "networking.gke.io",
                  json_string("the pods start with one interface: nothing reads " INTERFACES),
                  json_string("the cluster has no multi-networking, so pods get no NICs for RDMA"),
                  json_string("create the cluster with --enable-multi-networking, or set network.mode=host"));
    FOR_JSON (entry, interfaces)
        look_up(check, &missing_network, get_text(entry, "network"), "an interface in the pod's annotation is of it");
    json_decref(interfaces);
}

/* --- policies --- */

/* Does a rule of a policy allow traffic from pods with these labels to this port? */
static bool lets_in(const json_t *rule, const json_t *labels, const json_t *space_labels, long long port)
{
    const json_t *from = get(rule, "from"), *ports = get(rule, "ports");
    bool peer = json_array_size(from) == 0, open = json_array_size(ports) == 0;

    FOR_JSON (entry, from) {
        const json_t *pods = get(entry, "podSelector"), *spaces = get(entry, "namespaceSelector");

        /* An IP block may include the addresses of the pods: assume that it does. */
        peer |= get(entry, "ipBlock") != NULL || ((pods || spaces) && (!pods || get_selected(labels, pods)) &&
                                                  (!spaces || get_selected(space_labels, spaces)));
    }
    FOR_JSON (entry, ports) {
        const json_t *number = get(entry, "port");
        long long first = get_number(entry, "port", 0);

        if (get_is(entry, "protocol", "UDP"))
            continue;
        open |= !number || json_is_string(number) || first == port ||
                (first < port && port <= get_number(entry, "endPort", 0));
    }
    return peer && open;
}

/* A policy restricts incoming traffic unless its only type is Egress. */
static bool is_ingress(const json_t *policy)
{
    const json_t *types = get(policy, "spec/policyTypes");

    return json_array_size(types) != 1 || get(policy, "spec/ingress") ||
           strcmp(get_string(json_array_get(types, 0)), "Egress") != 0;
}

/* Policies are additive: traffic is dropped only if no policy of the pod allows it. */
static void check_policies(struct check *check, const struct deploy_set *set)
{
    const char *space = check->job->space, *closed = NULL, *text = deploy_variable(check->job, "EPKIT_SSH_PORT");
    const json_t *labels = get(set->metadata, "labels");
    const json_t *space_labels = get(get_item(check->snapshot, "namespaces", space, space), "metadata/labels");
    long long port = *text ? atoll(text) : 222;

    if (json_is_true(get(set->spec, "hostNetwork")) || set->count < 2)
        return;
    FOR_JSON (policy, get_items(check->snapshot, "networkpolicies")) {
        if (!get_selected(labels, get(policy, "spec/podSelector")) || !is_ingress(policy))
            continue;
        closed = get_name(policy);
        FOR_JSON (rule, get(policy, "spec/ingress"))
            if (lets_in(rule, labels, space_labels, port))
                return;
    }
    if (closed)
        check_add(check, CHECK_ERROR, "network-policy", "ssh", closed,
                  json_sprintf("Connection timed out during banner exchange (ssh between the pods, port %lld)", port),
                  json_sprintf("NetworkPolicy %s selects the pods, and no policy lets them reach each other", closed),
                  json_string("set networkPolicy.create=true"));
}

void check_pods(struct check *check)
{
    look_up(check, &missing_space, check->job->space, "nothing can be created in a namespace that does not exist");
    FOR_JSON (entry, check->job->documents)
        for (size_t n = 0; n < COUNT(document_lookups); n++)
            look_up_all(check, &document_lookups[n], entry, document_lookups[n].path);
    FOR_EACH (set, check->job->sets, check->job->n_sets) {
        for (size_t n = 0; n < COUNT(pod_lookups); n++)
            look_up_all(check, &pod_lookups[n], set->spec, pod_lookups[n].path);
        FOR_JSON (entry, get(set->spec, "initContainers"))
            check_image(check, get_text(entry, "image"));
        FOR_JSON (entry, get(set->spec, "containers"))
            check_image(check, get_text(entry, "image"));
        check_networks(check, set);
        check_policies(check, set);
    }
}
