/* SPDX-License-Identifier: Apache-2.0 */
/* check_pods.c - what the pods of a job refer to, each shown to be missing by one look-up; policies against ssh. */
#include "check.h"

#include <stdlib.h>

static const char *const container_lists[] = {"initContainers", "containers", NULL};

#define UNSTARTED "the container is not started (CreateContainerConfigError)"
#define UNMOUNTED "pods stay in ContainerCreating"

/* Is a name given, were its objects read, and is it none of them? `space`: NULL for objects without a namespace. */
static bool is_missing(const struct check *check, const char *resource, const char *space, const char *name)
{
    return *name && check_knows(check, resource) && !get_item(check->snapshot, resource, space, name);
}

static void check_secret(struct check *check, const json_t *source, const char *key, const char *why)
{
    const char *name = get_text(source, key), *space = check->job->space;

    if (is_missing(check, "secrets", space, name) && !get_flag(source, "optional"))
        CHECK_FIND(check, CHECK_ERROR, "secret-missing", "the kubelet", name, ("secret \"%s\" not found", name),
                   ("%s", why), ("create the Secret %s in namespace %s", name, space));
}

static void check_claim(struct check *check, const char *name)
{
    const char *space = check->job->space;

    if (is_missing(check, "persistentvolumeclaims", space, name))
        CHECK_FIND(check, CHECK_ERROR, "claim-missing", "the scheduler", name,
                   ("persistentvolumeclaim \"%s\" not found", name),
                   ("a pod waits for its volumes before it gets a node"),
                   ("create the claim in namespace %s, or name another one", space));
}

static void check_driver(struct check *check, const char *driver)
{
    bool is_fuse = strncmp(driver, "gcsfuse", 7) == 0;

    if (is_missing(check, "csidrivers", NULL, driver))
        CHECK_FIND(check, CHECK_ERROR, "csi-missing", "the kubelet", driver,
                   ("driver name %s not found in the list of registered CSI drivers", driver),
                   (UNMOUNTED ": no driver can mount their volume"),
                   ("%s%s",
                    is_fuse ? "gcloud container clusters update CLUSTER --update-addons=GcsFuseCsiDriver=ENABLED"
                            : "install the CSI driver ",
                    is_fuse ? "" : driver));
}

/* Environment variables with values from Secrets. */
static void check_variables(struct check *check, const json_t *container)
{
    const json_t *variable;
    size_t i;

    json_array_foreach (get_key(container, "env"), i, variable) {
        check_secret(check, get(variable, "valueFrom/secretKeyRef"), "name", UNSTARTED);
    }
    json_array_foreach (get_key(container, "envFrom"), i, variable) {
        check_secret(check, get_key(variable, "secretRef"), "name", UNSTARTED);
    }
}

static void check_volumes(struct check *check, const json_t *spec)
{
    const json_t *volume, *entry;
    size_t i;

    json_array_foreach (get_key(spec, "volumes"), i, volume) {
        check_claim(check, get_text(volume, "persistentVolumeClaim/claimName"));
        check_driver(check, get_text(volume, "csi/driver"));
        check_secret(check, get_key(volume, "secret"), "secretName", UNMOUNTED);
    }
    json_array_foreach (get_key(spec, "imagePullSecrets"), i, entry) {
        check_secret(check, entry, "name", "without it images are pulled anonymously, which fails for private ones");
    }
}

/* --- images --- */

/* The repository, without tag or digest: access is granted per repository. */
static size_t repository_of(const char *image)
{
    const char *slash = strrchr(image, '/'), *end = strpbrk(slash ? slash : image, ":@");

    return end ? (size_t)(end - image) : strlen(image);
}

/* The message of a pod that failed to pull from the same repository, or NULL. */
static const char *pull_failure(const json_t *pod, const char *list, const char *image)
{
    const json_t *state;
    size_t i, n = repository_of(image);

    json_array_foreach (get(pod, list), i, state) {
        const char *reason = get_text(state, "state/waiting/reason"), *other = get_text(state, "image");

        if ((strcmp(reason, "ImagePullBackOff") == 0 || strcmp(reason, "ErrImagePull") == 0) &&
            repository_of(other) == n && strncmp(other, image, n) == 0)
            return get_text(state, "state/waiting/message");
    }
    return NULL;
}

static void check_image(struct check *check, const char *image)
{
    const json_t *pod;
    size_t i;

    json_array_foreach (get_items(check->snapshot, "pods"), i, pod) {
        const char *message = pull_failure(pod, "status/containerStatuses", image);

        message = message ? message : pull_failure(pod, "status/initContainerStatuses", image);
        if (!message)
            continue;
        CHECK_FIND(check, CHECK_ERROR, "image-pull", "the kubelet", image, ("ImagePullBackOff: %s", message),
                   ("pod %s/%s cannot pull from that repository right now", get_space(pod), get_name(pod)),
                   ("give the nodes' service account roles/artifactregistry.reader on the repository, or name a Secret "
                    "in workload.imagePullSecrets"));
        return;
    }
}

/* --- networks and devices --- */

#define INTERFACES "networking.gke.io/interfaces"
#define DEFAULT_INTERFACE "networking.gke.io/default-interface"

/*
 * The list in the annotation of GKE, as a new reference; NULL: none, or a finding says what is wrong. The agent of
 * GKE's data plane refuses a pod without a default interface that is in the list.
 */
static json_t *read_interfaces(struct check *check, const struct deploy_set *set)
{
    const json_t *annotations = get_key(set->metadata, "annotations"), *interface;
    const char *list = get_string(get_key(annotations, INTERFACES));
    const char *standard = get_string(get_key(annotations, DEFAULT_INTERFACE));
    json_error_t error = {.line = 0};
    json_t *interfaces = *list ? json_loads(list, 0, &error) : NULL;
    bool is_listed = false;
    size_t i;

    if (!*list)
        return NULL;
    json_array_foreach (interfaces, i, interface) {
        is_listed |= *standard && strcmp(get_text(interface, "interfaceName"), standard) == 0;
    }
    if (json_is_array(interfaces) && is_listed)
        return interfaces;
    if (!json_is_array(interfaces)) {
        char why[160] = "the annotation " INTERFACES " has to be a list in JSON";

        if (!interfaces)
            CHECK_FORMAT(why, "the annotation " INTERFACES " is not JSON: line %d, column %d of it", error.line,
                         error.column);
        CHECK_FIND(check, CHECK_ERROR, "network-annotation", "the kubelet", INTERFACES,
                   ("failed to parse interface annotation: %.160s", interfaces ? "it is not a list" : error.text),
                   ("%s", why),
                   ("write [{\"interfaceName\":\"eth0\",\"network\":\"default\"}, ...], without a comma at the end"));
    } else if (!*standard) {
        CHECK_FIND(check, CHECK_ERROR, "network-annotation", "the kubelet", INTERFACES,
                   ("default interface must be specified for multi-nic pod"),
                   ("the pods have the annotation " INTERFACES " without " DEFAULT_INTERFACE),
                   ("add the annotation " DEFAULT_INTERFACE ": eth0"));
    } else {
        CHECK_FIND(check, CHECK_ERROR, "network-annotation", "the kubelet", INTERFACES,
                   ("default interface \"%.63s\" must be referenced in the interface annotation", standard),
                   ("no entry of " INTERFACES " has this interfaceName"),
                   ("add {\"interfaceName\":\"%.63s\",\"network\":\"default\"} to the list", standard));
    }
    json_decref(interfaces);
    return NULL;
}

/* Each network must exist. */
static void check_networks(struct check *check, const struct deploy_set *set)
{
    json_t *interfaces = read_interfaces(check, set), *interface;
    size_t i;

    if (interfaces && get_key(check->snapshot, "groups") && !check_serves(check, "networking.gke.io", NULL))
        CHECK_FIND(check, CHECK_WARNING, "multi-network", "nobody", "networking.gke.io",
                   ("the pods start with one interface: nothing reads " INTERFACES),
                   ("the cluster has no multi-networking, so pods get no NICs for RDMA"),
                   ("create the cluster with --enable-multi-networking, or set network.mode=host"));
    json_array_foreach (interfaces, i, interface) {
        const char *network = get_text(interface, "network");

        if (is_missing(check, "networks", NULL, network))
            CHECK_FIND(check, CHECK_ERROR, "network-missing", "the kubelet", network,
                       ("network \"%s\" not found", network),
                       ("the pod's annotation names it for interface %s", get_text(interface, "interfaceName")),
                       ("kubectl get networks, and set network.networks to the names there"));
    }
    json_decref(interfaces);
}

/* A request for devices: v1 has it below "exactly"; v1beta1 has its fields in the request itself. */
static void check_device_class(struct check *check, const json_t *request)
{
    const char *name = get_text(request, "exactly/deviceClassName");

    name = *name ? name : get_text(request, "deviceClassName");
    if (is_missing(check, "deviceclasses", NULL, name))
        CHECK_FIND(check, CHECK_ERROR, "device-class-missing", "the scheduler", name,
                   ("device class %s does not exist", name),
                   ("the claim for NICs can not be satisfied: pods stay pending"),
                   ("install DRANET on the node pool (GKE 1.34.1-gke.1829001 and later), or set network.mode=multi"));
}

static void check_documents(struct check *check)
{
    const json_t *document, *request;
    size_t i, r;

    json_array_foreach (check->job->documents, i, document) {
        bool is_template = strcmp(get_text(document, "kind"), "ResourceClaimTemplate") == 0;

        json_array_foreach (get(document, is_template ? "spec/spec/devices/requests" : "spec/devices/requests"), r,
                            request) {
            check_device_class(check, request);
        }
        if (strcmp(get_text(document, "kind"), "PersistentVolume") == 0)
            check_driver(check, get_text(document, "spec/csi/driver"));
    }
}

/* --- policies --- */

/* Does a rule of a policy allow traffic from pods with these labels to this port? */
static bool lets_in(const json_t *rule, const json_t *labels, const json_t *space_labels, long long port)
{
    const json_t *from = get_key(rule, "from"), *ports = get_key(rule, "ports"), *entry;
    bool peer = json_array_size(from) == 0, open = json_array_size(ports) == 0;
    size_t i;

    json_array_foreach (from, i, entry) {
        const json_t *pods = get_key(entry, "podSelector"), *spaces = get_key(entry, "namespaceSelector");

        /* An IP block may include the addresses of the pods: assume that it does. */
        peer |= get_key(entry, "ipBlock") != NULL || ((pods || spaces) && (!pods || get_selected(labels, pods)) &&
                                                      (!spaces || get_selected(space_labels, spaces)));
    }
    json_array_foreach (ports, i, entry) {
        const json_t *number = get_key(entry, "port");
        long long first = get_number(entry, "port", 0);

        if (strcmp(get_text(entry, "protocol"), "UDP") == 0)
            continue;
        open |= !number || json_is_string(number) || first == port ||
                (first < port && port <= get_number(entry, "endPort", 0));
    }
    return peer && open;
}

static long long ssh_port(const struct deploy_set *set)
{
    const char *port = deploy_variable(set, "EPKIT_SSH_PORT");

    return *port ? atoll(port) : 222;
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
    const json_t *labels = get_key(set->metadata, "labels"), *policy, *rule;
    const json_t *space = get(get_item(check->snapshot, "namespaces", NULL, check->job->space), "metadata/labels");
    const char *closed = NULL;
    size_t i, r;

    if (get_flag(set->spec, "hostNetwork") || set->count < 2)
        return;
    json_array_foreach (get_items(check->snapshot, "networkpolicies"), i, policy) {
        if (!get_selected(labels, get(policy, "spec/podSelector")) || !is_ingress(policy))
            continue;
        closed = get_name(policy);
        json_array_foreach (get(policy, "spec/ingress"), r, rule) {
            if (lets_in(rule, labels, space, ssh_port(set)))
                return;
        }
    }
    if (closed)
        CHECK_FIND(check, CHECK_ERROR, "network-policy", "ssh", closed,
                   ("Connection timed out during banner exchange (ssh between the pods, port %lld)", ssh_port(set)),
                   ("NetworkPolicy %s selects the pods, and no policy lets them reach each other", closed),
                   ("set networkPolicy.create=true"));
}

void check_pods(struct check *check)
{
    const json_t *container;
    size_t i;

    check_documents(check);
    for (int s = 0; s < check->job->n_sets; s++) {
        const struct deploy_set *set = &check->job->sets[s];

        for (size_t n = 0; container_lists[n]; n++)
            json_array_foreach (get_key(set->spec, container_lists[n]), i, container) {
                check_variables(check, container);
                check_image(check, get_text(container, "image"));
            }
        check_volumes(check, set->spec);
        check_networks(check, set);
        check_policies(check, set);
    }
}
