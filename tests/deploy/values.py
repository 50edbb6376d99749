#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Values of the chart: every one of them must change what the cluster gets.

values.py list CHART         leaves of values.yaml that no case here changes, and cases of leaves that are not there
values.py render CHART       each case rendered by helm, without and with the change: the two must differ
values.py objects CHART DIR [PREFIX]  writes a list for kubectl, DIR/objects.json: a release without and one with each
                             change, all in the namespace "values", and a second one without each change. PREFIX: of
                             the values that begin with it alone
values.py compare FILE [PREFIX]  what `kubectl get -A -o json` of those kinds says: again the two must differ; and the two
                             without a change must not, or the cluster itself made the difference
values.py odd CHART          names and numbers that YAML takes for something else come out as they were given
values.py matrix DIR CHART   DIR/objects.json for stack x network x queue x volumes x orchestrator, namespace "matrix", and
                             DIR/expected: the name of the Job or StatefulSet that each cell must become
"""
import itertools
import json
import re
import subprocess
import sys

import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML has it
IMAGE = ["--set", "workload.image=registry.example/nemo-deepep:25.11"]
QUEUE = ["--set", "queue=a4"]
MULTI = ["--set", "network.mode=multi"]
DRANET = ["--set", "network.mode=dranet"]
HOST = ["--set", "stack=host"]
GCS = ["--set", "volumes.gcsMounts[0].bucketName=logs-bucket"]
NFS = ["--set", "volumes.nfs.ip=192.0.2.9", "--set", "volumes.nfs.volume=share"]
FILESTORE = NFS + ["--set", "volumes.nfs.region=us-central1-b", "--set", "volumes.nfs.instance=store"]
LAUNCHER = ["--set", "workload_launcher=exit 0"]
OPERATOR = ["--set", "gpuOperator.moduleConfig.create=true"]
PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEexample somebody"


def case(change, context=()):
    """A change, and what else must be set for it to have a meaning."""
    return [change if isinstance(change, list) else ["--set", change], list(context)]


CASES = {
    "orchestrator": case("orchestrator=leaderworkerset"),
    "stack": case("stack=managed"),
    "workload_launcher": case(LAUNCHER),
    "RUN_DEEPEP_TEST": case("RUN_DEEPEP_TEST=true"),
    "SLEEP_INFINITY": case("SLEEP_INFINITY=true"),
    "HF_TOKEN": case("HF_TOKEN=hf_example"),
    "SSH_PUBLIC_KEY": case("SSH_PUBLIC_KEY=" + PUBLIC_KEY),
    "workload.image": case("workload.image=registry.example/other:1"),
    "workload.imagePullPolicy": case("workload.imagePullPolicy=Always"),
    "workload.imagePullSecrets": case("workload.imagePullSecrets[0]=pull"),
    "workload.gpus": case("workload.gpus=32"),
    "workload.job": case("workload.job=nccl"),
    "workload.arguments": case("workload.arguments={--quick,7}"),
    "workload.envs": case(["--set-json", 'workload.envs=[{"name":"DEBUG","value":"1"}]']),
    "workload.config": case("workload.config=a: 1"),
    "workload.completion": case("workload.completion=coordinator", LAUNCHER),
    "workload.restarts": case("workload.restarts=2"),
    "workload.ttlSecondsAfterFinished": case("workload.ttlSecondsAfterFinished=60"),
    "workload.terminationGracePeriodSeconds": case("workload.terminationGracePeriodSeconds=5"),
    "workload.sharedMemory": case("workload.sharedMemory=8Gi"),
    "workload.resources": case("workload.resources.requests.cpu=8"),
    "workload.serviceAccountName": case("workload.serviceAccountName=runner"),
    "workload.priorityClassName": case("workload.priorityClassName=system-node-critical"),
    "workload.privileged": case("workload.privileged=true"),
    "workload.labels": case("workload.labels.team=a"),
    "workload.annotations": case("workload.annotations.note=a"),
    "queue": case("queue=a4"),
    "tasSettings.topologyRequest": case(["--set-json", "tasSettings.topologyRequest=null"], QUEUE),
    "dwsSettings.maxRunDurationSeconds": case("dwsSettings.maxRunDurationSeconds=3600", QUEUE),
    "accelerator": case("accelerator=nvidia-b200"),
    "nodeSelector": case("nodeSelector.pool=a"),
    "targetNodes": case("targetNodes={a4-0,a4-1}"),
    "avoidNodes": case("avoidNodes={a4-3}"),
    "tolerations": case(["--set-json", 'tolerations=[{"key":"reserved","operator":"Exists"}]']),
    "host.driverPath": case("host.driverPath=/srv/nvidia", HOST),
    "host.stackPath": case("host.stackPath=/srv/deepep", HOST),
    "network.mode": case("network.mode=host"),
    "network.networks": case("network.networks={default,rdma-0}", MULTI),
    "network.deviceClass": case("network.deviceClass=nic.example", DRANET),
    "network.nicsPerNode": case("network.nicsPerNode=4", DRANET),
    "network.gibImage": case("network.gibImage=registry.example/gib:1"),
    "network.nccl": case("network.nccl.NCCL_IB_TC=52"),
    "network.clusterDomain": case("network.clusterDomain=example.internal"),
    "network.masterPort": case("network.masterPort=6002"),
    "ssh.enabled": case("ssh.enabled=false"),
    "ssh.port": case("ssh.port=2222"),
    "ssh.existingSecret": case("ssh.existingSecret=mine"),
    "networkPolicy.create": case("networkPolicy.create=true"),
    "volumes.gcsMounts": case(GCS),
    "volumes.gcsSidecar.cpuLimit": case(["--set-string", "volumes.gcsSidecar.cpuLimit=2"], GCS),
    "volumes.gcsSidecar.memoryLimit": case("volumes.gcsSidecar.memoryLimit=1Gi", GCS),
    "volumes.gcsSidecar.ephemeralStorageLimit": case("volumes.gcsSidecar.ephemeralStorageLimit=1Gi", GCS),
    "volumes.psMounts": case("volumes.psMounts[0].claimName=ps,volumes.psMounts[0].mountPath=/ps"),
    "volumes.pvcMounts": case("volumes.pvcMounts[0].claimName=pvc,volumes.pvcMounts[0].mountPath=/pvc"),
    "volumes.nfs.ip": case("volumes.nfs.ip=192.0.2.10", NFS),
    "volumes.nfs.region": case("volumes.nfs.region=europe-west4-a", FILESTORE),
    "volumes.nfs.instance": case("volumes.nfs.instance=other", FILESTORE),
    "volumes.nfs.volume": case("volumes.nfs.volume=other", NFS),
    "volumes.nfs.storage": case("volumes.nfs.storage=2Ti", NFS),
    "volumes.nfs.mountPath": case("volumes.nfs.mountPath=/data", NFS),
    "volumes.ssdMountPath": case("volumes.ssdMountPath=/ssd"),
    "volumes.ssdHostPath": case("volumes.ssdHostPath=/mnt/disks/ssd0", ["--set", "volumes.ssdMountPath=/ssd"]),
    "gpuOperator.moduleConfig.create": case(OPERATOR),
    "gpuOperator.moduleConfig.name": case("gpuOperator.moduleConfig.name=module-params", OPERATOR),
    "gpuOperator.moduleConfig.namespace": case("gpuOperator.moduleConfig.namespace=kube-system", OPERATOR),
}


def leaves(value, path=""):
    """Paths of a tree of values; an empty map or list is a leaf, and so is a map whose keys are a user's."""
    if isinstance(value, dict) and value and path != "tasSettings.topologyRequest":
        for key, below in value.items():
            yield from leaves(below, f"{path}.{key}" if path else key)
    else:
        yield path


def render(chart, release, namespace, arguments):
    text = subprocess.run(["helm", "template", release, chart, "--namespace", namespace, *IMAGE, *arguments],
                          check=True, stdout=subprocess.PIPE).stdout
    return [document for document in yaml.load_all(text, Loader=LOADER) if document]


def comparable(documents, release):
    """Without what differs each time: keys, and the name of the release."""
    documents = json.loads(re.sub(rf"\b{release}\b", "RELEASE", json.dumps(documents)))
    for document in documents:
        if document["kind"] == "Secret" and document["metadata"]["name"].endswith("-ssh"):
            document.pop("data")
    return sorted(documents, key=lambda document: (document["kind"], document["metadata"]["name"]))


def check_list(chart):
    with open(f"{chart}/values.yaml", encoding="utf-8") as stream:
        there = set(leaves(yaml.safe_load(stream)))
    for path in sorted(there - set(CASES)):
        print(f"no case changes {path}")
    for path in sorted(set(CASES) - there):
        print(f"there is no value {path}")
    return there == set(CASES)


def check_render(chart):
    bases, dead = {}, []
    for path, (change, context) in CASES.items():
        key = tuple(context)
        if key not in bases:
            bases[key] = comparable(render(chart, "v", "ns", context), "v")
        if comparable(render(chart, "v", "ns", context + change), "v") == bases[key]:
            dead.append(path)
    for path in dead:
        print(f"{path} changes nothing")
    print(f"{len(CASES) - len(dead)} of {len(CASES)} values change what is rendered")
    return not dead


def write(folder, objects):
    with open(f"{folder}/objects.json", "w", encoding="utf-8") as stream:
        json.dump({"apiVersion": "v1", "kind": "List", "items": objects}, stream)


def sides_of(prefix):
    """(number, path, sides) of the cases: a without the change, b with it; of the first case of a context, c, as a is."""
    contexts = set()
    for number, (path, (change, context)) in enumerate(CASES.items()):
        if path.startswith(prefix):
            first = tuple(context) not in contexts
            contexts.add(tuple(context))
            yield number, path, {"a": context, "b": context + change, **({"c": context} if first else {})}


def write_objects(chart, folder, prefix=""):
    objects = []
    for number, path, sides in sides_of(prefix):
        for side, arguments in sides.items():
            release = f"v{number}{side}"
            # That ConfigMap is in a namespace of its own, with a name that is not the release's: one for each case.
            own = ["--set", f"gpuOperator.moduleConfig.name={release}"] if OPERATOR[1] in arguments and not (
                path == "gpuOperator.moduleConfig.name" and side == "b") else []
            objects += render(chart, release, "values", arguments + own)
    write(folder, objects)
    return True


VOLATILE = ("uid", "resourceVersion", "creationTimestamp", "generation", "managedFields", "finalizers")


def strip_server(item):
    """Takes away what the cluster writes: each time another, or as soon as a volume is bound."""
    for key in VOLATILE:
        item["metadata"].pop(key, None)
    annotations = item["metadata"].get("annotations", {})
    for key in [key for key in annotations if key.startswith(("pv.kubernetes.io/", "volume.kubernetes.io/"))]:
        annotations.pop(key)
    if not annotations:
        item["metadata"].pop("annotations", None)
    item.pop("status", None)
    if item["kind"] == "PersistentVolume" and "claimRef" in item["spec"]:
        claim = item["spec"]["claimRef"]
        item["spec"]["claimRef"] = {key: claim[key] for key in ("namespace", "name") if key in claim}


def differences(one, other, path=""):
    """Paths at which two values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(set(one) | set(other)):
            yield from differences(one.get(key), other.get(key), f"{path}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for n, pair in enumerate(zip(one, other)):
            yield from differences(*pair, f"{path}[{n}]")
    elif one != other:
        yield path


def check_compare(file, prefix=""):
    with open(file, encoding="utf-8") as stream:
        items = json.load(stream)["items"]
    found, wrong, n = {}, [], 0
    for item in items:
        strip_server(item)
        found.setdefault(item["metadata"].get("labels", {}).get("app.kubernetes.io/instance"), []).append(item)
    for number, path, names in sides_of(prefix):
        sides = {side: comparable(found.get(f"v{number}{side}", []), f"v{number}{side}") for side in names}
        n += 1
        if not all(sides.values()):
            wrong.append(f"{path}: nothing was created")
        elif sides["a"] == sides["b"]:
            wrong.append(f"{path} changes no object of the cluster")
        if "c" in sides:
            wrong += [f"without the change of {path} two releases differ all the same, in {where}"
                      for where in differences(sides["a"], sides["c"])]
    print("\n".join([*wrong, f"{n} values, {len(wrong)} problems"]))
    return n > 0 and not wrong


VOLUMES = {
    "none": [], "gcs": GCS, "nfs": NFS, "filestore": FILESTORE,
    "parallelstore": CASES["volumes.psMounts"][0], "claim": CASES["volumes.pvcMounts"][0],
    "ssd": CASES["volumes.ssdMountPath"][0],
}


def write_matrix(folder, chart):
    """Every cell of stack x network x queue x orchestrator x volumes: each has one node, so one Job or StatefulSet."""
    objects, expected, n = [], [], 0
    for stack, mode, queue, kind, volume in itertools.product(
            ("image", "host", "managed"), ("host", "multi", "dranet"), (False, True), ("jobset", "leaderworkerset"),
            VOLUMES):
        objects += render(chart, f"m{n}", "matrix", [
            "--set", f"stack={stack},network.mode={mode},orchestrator={kind},workload.gpus=8",
            *(QUEUE if queue else []), *VOLUMES[volume]])
        expected.append(f"job.batch/m{n}-workload-0" if kind == "jobset" else f"statefulset.apps/m{n}")
        n += 1
    write(folder, objects)
    with open(f"{folder}/expected", "w", encoding="utf-8") as stream:
        stream.write("".join(f"{name}\n" for name in sorted(expected)))
    return True


# Names that are numbers and truth values to YAML, and numbers as a file of values has them.
ODD = """
workload:
  image: registry.example/1:1
  imagePullSecrets: ["1e3", "true"]
  arguments: [8388608, 0.5, true, 123456789012]
  terminationGracePeriodSeconds: 86400000
  ttlSecondsAfterFinished: 25920000
  serviceAccountName: "0123"
  priorityClassName: "1e3"
  labels: {example.com/n: "1"}
  annotations: {gke-gcsfuse/cpu-limit: "4", n: "true"}
  resources: {limits: {memory: 1Gi}}
queue: "1e3"
dwsSettings: {maxRunDurationSeconds: 6048000}
network:
  mode: %s
  deviceClass: "1e3"
  gibImage: registry.example/gib:1
  nccl: {NCCL_BUFFSIZE: 8388608, NCCL_PLUGIN_PATH: /plugin, NCCL_CROSS_NIC: true}
networkPolicy: {create: true}
HF_TOKEN: "1"
ssh: {existingSecret: "%s"}
volumes:
  gcsMounts: [{bucketName: "123"}]
  pvcMounts: [{claimName: "1e3", mountPath: "/1"}]
  nfs: {ip: 192.0.2.1, volume: "1", storage: "1"}
gpuOperator: {moduleConfig: {create: true, name: "1e3", namespace: "1e3"}}
"""


class Strict(LOADER):
    """Refuses a map with a key twice, as an API server does."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if len(set(keys)) != len(keys):
            raise yaml.YAMLError(f"line {node.start_mark.line + 1}: a key is there twice: {sorted(map(str, keys))}")
        return super().construct_mapping(node, deep)


NUMBERS = ("parallelism", "completions", "size", "replicas", "backoffLimit", "maxRestarts", "ttlSecondsAfterFinished",
           "terminationGracePeriodSeconds", "containerPort", "defaultMode", "nvidia.com/gpu", "count")


def faults(value, path=""):
    """Whatever is no text and should be, is half a number, or is there twice."""
    if isinstance(value, dict):
        for key, below in value.items():
            if not isinstance(key, str):
                yield f"{path}: the key {key!r} is no text"
            yield from faults(below, f"{path}.{key}")
    elif isinstance(value, list):
        names = [item["name"] for item in value if isinstance(item, dict) and "name" in item]
        if len(set(names)) != len(names):
            yield f"{path}: a name is there twice: {sorted(map(str, names))}"
        for item in value:
            yield from faults(item, path + "[]")
    elif isinstance(value, bool) or value is None:
        if value is None and not path.endswith((".requests", ".limits", ".resources")):
            yield f"{path} is null"
    elif not isinstance(value, str) and (isinstance(value, float) or not path.endswith(NUMBERS)):
        yield f"{path} is {value!r}"


def check_odd(chart):
    found = []
    for release, kind, mode, secret in itertools.product(("true", "null", "on"), ("jobset", "leaderworkerset"),
                                                         ("multi", "dranet"), ("", "1e3")):
        text = subprocess.run(["helm", "template", release, chart, "--namespace", "1e3", "--set",
                               f"orchestrator={kind}", "-f", "-"], input=(ODD % (mode, secret)).encode(), check=True,
                              stdout=subprocess.PIPE).stdout
        for document in yaml.load_all(text, Loader=Strict):
            if document:
                found += [f"{release} {kind} {mode}: {fault}" for fault in faults(document, document["kind"])]
                found += [f"{document['kind']} is in {document['metadata']['namespace']!r}"
                          for space in [document["metadata"].get("namespace", "1e3")] if space != "1e3"]
    pod = next(document for document in yaml.load_all(text, Loader=LOADER) if document and document["kind"] == "LeaderWorkerSet")
    pod = pod["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    container = pod["spec"]["containers"][0]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    for what, got, wanted in (
            ("arguments", container["args"], ["8388608", "0.5", "true", "123456789012"]),
            ("NCCL_BUFFSIZE", env["NCCL_BUFFSIZE"], "8388608"),
            ("NCCL_PLUGIN_PATH, which network.nccl sets, too", env["NCCL_PLUGIN_PATH"], "/plugin"),
            ("the grace period", pod["spec"]["terminationGracePeriodSeconds"], 86400000),
            ("an annotation of the user's", pod["metadata"]["annotations"]["gke-gcsfuse/cpu-limit"], "4"),
            ("limits of the init container", pod["spec"]["initContainers"][0]["resources"]["limits"], {"memory": "1Gi"})):
        if got != wanted:
            found.append(f"{what}: {got!r} instead of {wanted!r}")
    print("\n".join(sorted(set(found))))
    return not found


def main():
    actions = {"list": check_list, "render": check_render, "objects": write_objects, "compare": check_compare,
               "matrix": write_matrix, "odd": check_odd}
    return 0 if actions[sys.argv[1]](*sys.argv[2:]) else 1


if __name__ == "__main__":
    sys.exit(main())
