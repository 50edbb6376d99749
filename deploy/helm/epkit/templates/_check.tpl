{{/* What the schema cannot say: contradictions between values, each with the value's name and what to do. */}}
{{- define "epkit.check" -}}
{{- $v := .Values -}}
{{- $nodes := include "epkit.nodes" . | int -}}
{{- if and .Release.IsUpgrade (eq $v.orchestrator "jobset") -}}
  {{- fail (printf "the pods of a JobSet cannot be changed: helm -n %s uninstall %s, then helm install" .Release.Namespace .Release.Name) -}}
{{- end -}}
{{- if not $v.workload.image -}}
  {{- fail "workload.image is empty: name the image to run, --set workload.image=REGISTRY/nemo-deepep:25.11" -}}
{{- end -}}
{{- /* The kernel would look for an interpreter whose name ends in a carriage return, or not see '#!' behind the mark. */}}
{{- if regexMatch "^[^\n]*\r\n" $v.workload_launcher -}}
  {{- fail "workload_launcher: its lines end in CR LF: sed -i 's/\\r$//' FILE" -}}
{{- end -}}
{{- if hasPrefix "\uFEFF" $v.workload_launcher -}}
  {{- fail "workload_launcher: a byte order mark precedes its first line: sed -i '1s/^\\xEF\\xBB\\xBF//' FILE" -}}
{{- end -}}
{{- /* Not in the schema: its message would show the token. */}}
{{- if and $v.HF_TOKEN (not (regexMatch "^[!-~]+$" (trim $v.HF_TOKEN))) -}}
  {{- fail "HF_TOKEN is not one word of printable characters: give the token alone" -}}
{{- end -}}
{{- /* Names of pods: NAME-workload-0-INDEX-xxxxx of a JobSet, NAME-0-INDEX of a LeaderWorkerSet; 63 characters at most. */}}
{{- $rest := eq $v.orchestrator "jobset" | ternary "-workload-0--xxxxx" "-0-" -}}
{{- $room := sub (sub 63 (len $rest)) (len (toString (sub $nodes 1))) | int -}}
{{- if gt (len .Release.Name) $room -}}
  {{- fail (printf "the release name '%s' has %d characters: with %d nodes at most %d fit into the names of the pods" .Release.Name (len .Release.Name) $nodes $room) -}}
{{- end -}}
{{- if contains "." .Release.Name -}}
  {{- fail (printf "the release name '%s' has a dot, which the host names of the pods cannot have" .Release.Name) -}}
{{- end -}}
{{- if regexMatch "^[0-9]" .Release.Name -}}
  {{- fail (printf "the release name '%s' begins with a digit, which the Service of its pods cannot" .Release.Name) -}}
{{- end -}}
{{- range $v.targetNodes -}}
  {{- if has . $v.avoidNodes -}}
    {{- fail (printf "node %s is both in targetNodes and in avoidNodes" .) -}}
  {{- end -}}
{{- end -}}
{{- if and $v.targetNodes (lt (len $v.targetNodes) $nodes) -}}
  {{- fail (printf "workload.gpus=%d needs %d nodes, and targetNodes names %d" (int $v.workload.gpus) $nodes (len $v.targetNodes)) -}}
{{- end -}}
{{- if and $v.dwsSettings.maxRunDurationSeconds (not $v.queue) -}}
  {{- fail "dwsSettings.maxRunDurationSeconds needs a queue: set queue, or leave it out" -}}
{{- end -}}
{{- $topology := list -}}
{{- range $key, $value := ($v.tasSettings.topologyRequest | default dict) -}}
  {{- if $value -}}{{- $topology = append $topology $key -}}{{- end -}}
{{- end -}}
{{- if gt (len $topology) 1 -}}
  {{- fail (printf "tasSettings.topologyRequest has %s: keep one, set the others to null" (join " and " $topology)) -}}
{{- end -}}
{{- if and (eq $v.orchestrator "leaderworkerset") (or $v.workload.restarts (ne $v.workload.completion "auto")) -}}
  {{- fail "workload.restarts and workload.completion are of a JobSet: a LeaderWorkerSet restarts its pods always" -}}
{{- end -}}
{{- if and $v.ssh.existingSecret (not $v.ssh.enabled) -}}
  {{- fail "ssh.existingSecret needs ssh.enabled=true" -}}
{{- end -}}
{{- if and (eq $v.network.mode "host") (eq (int $v.ssh.port) 22) $v.ssh.enabled -}}
  {{- fail "ssh.port=22 with network.mode=host is the port of the node's own sshd: choose another one" -}}
{{- end -}}
{{- with $v.volumes.nfs -}}
  {{- if and .ip (not .volume) -}}
    {{- fail "volumes.nfs.ip without volumes.nfs.volume: name the share ('gcloud filestore instances list' shows it)" -}}
  {{- end -}}
  {{- if ne (empty .region) (empty .instance) -}}
    {{- fail "volumes.nfs.region and volumes.nfs.instance belong together: give both for Filestore, neither for a plain NFS server" -}}
  {{- end -}}
  {{- if and (not .ip) (or .volume .instance) -}}
    {{- fail "volumes.nfs.volume or .instance without volumes.nfs.ip: give the address of the server" -}}
  {{- end -}}
{{- end -}}
{{- if and $v.volumes.ssdHostPath (not $v.volumes.ssdMountPath) -}}
  {{- fail "volumes.ssdHostPath needs volumes.ssdMountPath, the folder in the container" -}}
{{- end -}}
{{- range $key, $value := ($v.workload.labels | default dict) -}}
  {{- if hasKey (include "epkit.labels" $ | fromYaml) $key -}}
    {{- fail (printf "workload.labels sets %s, which the chart sets itself" $key) -}}
  {{- end -}}
{{- end -}}
{{- range $kind := tuple "requests" "limits" -}}
  {{- if hasKey (get ($v.workload.resources | default dict) $kind | default dict) "nvidia.com/gpu" -}}
    {{- fail (printf "workload.resources.%s sets nvidia.com/gpu: say workload.gpus, 8 for each pod" $kind) -}}
  {{- end -}}
{{- end -}}
{{- $wanted := get ($v.nodeSelector | default dict) "cloud.google.com/gke-accelerator" -}}
{{- if and $wanted $v.accelerator (ne $wanted $v.accelerator) -}}
  {{- fail (printf "accelerator is %s, and nodeSelector wants %s: keep one" $v.accelerator $wanted) -}}
{{- end -}}
{{- $seen := dict -}}
{{- range $v.workload.envs -}}
  {{- if hasKey $seen .name -}}{{- fail (printf "workload.envs sets %s twice" .name) -}}{{- end -}}
  {{- $_ := set $seen .name true -}}
{{- end -}}
{{- $paths := dict -}}
{{- range (include "epkit.mounts" . | fromYamlArray) -}}
  {{- $path := trimSuffix "/" .mountPath -}}
  {{- if hasKey $paths $path -}}
    {{- fail (printf "two volumes are mounted at %s: %s and %s" $path (get $paths $path) .name) -}}
  {{- end -}}
  {{- $_ := set $paths $path .name -}}
{{- end -}}
{{- range $name := tuple "EPKIT_SSH_PORT" "NNODES" "JOB_COMPLETION_INDEX" "MASTER_ADDR" "HOSTNAME_PREFIX" "DOMAIN_NAME" -}}
  {{- range $v.workload.envs -}}
    {{- if eq .name $name -}}
      {{- fail (printf "workload.envs sets %s, which the chart sets from other values" $name) -}}
    {{- end -}}
  {{- end -}}
  {{- if hasKey ($v.network.nccl | default dict) $name -}}
    {{- fail (printf "network.nccl sets %s, which the chart sets from other values" $name) -}}
  {{- end -}}
{{- end -}}
{{- end -}}
