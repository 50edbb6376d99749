#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What can be said of Dockerfiles and of Cloud Build's configuration without building anything.

images.py lint FILE...        rules on each Dockerfile
images.py failures FILE...    each command of each RUN made to fail, by the shell that the file names: RUN must fail
images.py layers ARCHIVE...   no key in any layer of an image (docker-archive), nor in one that a later layer hides
images.py cloudbuild FILE     steps, substitutions and images of a configuration fit together
"""
import json
import os
import re
import subprocess
import sys
import tarfile

import yaml


def instructions(path):
    """(line, keyword, text) of each instruction; continued lines are joined, comments left out."""
    text, start, result = "", 0, []
    with open(path, encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            if re.match(r"\s*#", line) or (not text and not line.strip()):
                continue
            start = start if text else number
            text += line.rstrip("\n").removesuffix("\\") + " "
            if not line.rstrip("\n").endswith("\\"):
                keyword, _, rest = text.strip().partition(" ")
                result.append((start, keyword.upper(), rest.strip()))
                text = ""
    return result


def lint_run(text):
    if re.search(r"\|\|\s*(true|:|echo)", text):
        yield "hides a failure behind ||"
    if re.search(r"(^|[^\\;'\"]);(?!;)", re.sub(r"'[^']*'|\"[^\"]*\"|\\;", "", text)):
        yield "goes on after a failure behind ;"
    if "apt-get install" in text and not ("--no-install-recommends" in text and "rm -rf /var/lib/apt/lists" in text):
        yield "leaves package lists, or installs what is recommended"
    if re.search(r"git clone|git .*fetch(?!.*_COMMIT)", text):
        yield "takes what a branch or tag names today, and no commit"
    if re.search(r"curl|wget", text) and "sha256sum" not in text:
        yield "downloads without a checksum"
    if "ssh-keygen" in text:
        yield "makes a key, which everybody would share"
    if re.search(r"install\b.*\bopenssh-server\b", text) and "ssh_host_" not in text.partition("openssh-server")[2]:
        yield "leaves the host keys that openssh-server makes in its layer"
    if "<<" in text.replace("<<<", ""):
        yield "has a here-document, whose commands go on after a failure"
    if re.search(r"\bset \+", text):
        yield "lets failures pass from here on"
    if re.search(r"(?<![&>])&(?![&>0-9])", re.sub(r"'[^']*'|\"[^\"]*\"", "", text)):
        yield "does not wait for a command behind &"
    if re.search(r"\b(test|\[|echo|printf)\s[^&|;]*\$\((?!nproc\))", text):
        yield "does not see the failure of a command in $(...)"


def lint(path):
    problems, stages, shell, arguments = [], set(), False, {}
    for line, keyword, text in instructions(path):
        found = []
        if keyword == "ARG":
            name, _, value = text.partition("=")
            arguments[name] = value
            if re.search(r"TOKEN|PASSWORD|SECRET", name):
                found.append("a secret as an argument stays in the image's history")
        elif keyword == "FROM":
            image = re.sub(r"\$\{(\w+)\}", lambda match: arguments.get(match[1], ""), text.split()[0])
            if image not in stages and not re.search(r":[\w.-]+$", image):
                found.append(f"base image {image} without a tag")
            if re.search(r":latest$", image):
                found.append("base image :latest is another one tomorrow")
            if image.startswith("registry.k8s.io/") and not re.search(r"@sha256:[0-9a-f]{64}$", image):
                found.append("a program of another image without its digest")
            stages.update(re.findall(r"(?i) as (\S+)", text))
            shell = False
        elif keyword == "SHELL":
            shell = json.loads(text) == ["/bin/bash", "-euo", "pipefail", "-c"]
        elif keyword == "RUN":
            found += lint_run(text)
            if not shell:
                found.append("runs in a shell that goes on after a failure in a pipe")
        elif keyword == "ADD":
            found.append("ADD instead of COPY")
        if re.search(r"BEGIN [A-Z ]*PRIVATE KEY|AKIA[0-9A-Z]{16}|\bhf_[A-Za-z0-9]{20}", text):
            found.append("a key")
        problems += [f"{os.path.basename(path)}:{line}: {problem}" for problem in found]
    return problems


def commands(text):
    """Places of the simple commands of a shell text: (start, end). Quotes and substitutions stay inside."""
    places, start, quote, depth, at = [], 0, "", 0, 0
    while at < len(text):
        char = text[at]
        if quote:
            at += 2 if char == "\\" and quote == '"' else 1
            quote = "" if char == quote else quote
        elif char == "\\":
            at += 2
        elif char in "'\"":
            quote = char
            at += 1
        elif char in "()":
            depth += 1 if char == "(" else -1
            at += 1
        elif depth == 0 and (text.startswith("&&", at) or text.startswith("||", at)):
            places.append((start, at))
            at += 2
            start = at
        elif depth == 0 and char in "|;":
            places.append((start, at))
            at += 1
            start = at
        else:
            at += 1
    places.append((start, len(text)))
    return [place for place in places if text[place[0]:place[1]].strip()]


def check_failures(path):
    problems, n = [], 0
    for line, keyword, text in instructions(path):
        if keyword != "RUN":
            continue
        places = commands(text)
        for victim in range(len(places)):
            script = text
            for number, (start, end) in reversed(list(enumerate(places))):
                script = f"{script[:start]} {'false' if number == victim else 'true'} {script[end:]}"
            n += 1
            if subprocess.run(["/bin/bash", "-euo", "pipefail", "-c", script], check=False).returncode == 0:
                problems.append(f"{os.path.basename(path)}:{line}: succeeds although this fails: "
                                f"{text[slice(*places[victim])].strip()}")
    print(f"{os.path.basename(path)}: {n} commands made to fail")
    return problems


# A line of base64 after it: programs that read keys have the words alone.
PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\r?\n(?:[A-Za-z-]+: [^\n]*\n)*\s*[A-Za-z0-9+/=]{32,}")
KEY_FILE = re.compile(r"(^|/)(ssh_host_\w+_key|\.ssh/(id_\w+|authorized_keys))$")


def has_private_key(content):
    # Libraries of cryptography bring keys that they test themselves with.
    return not content.startswith(b"\x7fELF") and PRIVATE_KEY.search(content)


def check_layers(path):
    problems = []
    with tarfile.open(path) as archive:
        layers = json.load(archive.extractfile("manifest.json"))[0]["Layers"]
        for number, name in enumerate(layers):
            with tarfile.open(fileobj=archive.extractfile(name)) as layer:
                for member in layer:
                    if not member.isfile():
                        continue
                    if KEY_FILE.search(member.name) and member.size:
                        problems.append(f"layer {number}: {member.name} is a key")
                    elif has_private_key(layer.extractfile(member).read()):
                        problems.append(f"layer {number}: {member.name} has a private key in it")
    print(f"{os.path.basename(path)}: {len(layers)} layers")
    return problems if layers else ["no layers"]


def check_cloudbuild(path):
    problems = []
    with open(path, encoding="utf-8") as stream:
        text = stream.read()
    build = yaml.safe_load(text)
    body = re.sub(r"#.*", "", text)
    used = set(re.findall(r"\$\{(_[A-Z_]+)\}", body))
    declared = set(build["substitutions"])
    problems += [f"substitution {name} is not declared" for name in sorted(used - declared)]
    problems += [f"substitution {name} is not used" for name in sorted(declared - used)]
    built = {step["args"][step["args"].index("-t") + 1] for step in build["steps"] if "-t" in step.get("args", [])}
    problems += [f"{image} is pushed and not built" for image in sorted(set(build["images"]) - built)]
    problems += [f"{image} is built and not pushed" for image in sorted(built - set(build["images"]))]
    root = os.path.dirname(os.path.dirname(os.path.abspath(path)))
    for step in build["steps"]:
        arguments = step.get("args", [])
        if "-f" in arguments:
            file = f"{root}/{arguments[arguments.index('-f') + 1]}"
            known = {text.split("=")[0] for _, keyword, text in instructions(file) if keyword == "ARG"}
            given = {match[1] for match in map(re.compile(r"--build-arg=(\w+)=").match, arguments) if match}
            problems += [f"{file} has no argument {name}" for name in sorted(given - known)]
        if "allowFailure" in step:
            problems.append(f"step {step.get('id')} may fail")
    if build["timeout"] != "7200s" or build["options"]["machineType"] != "E2_HIGHCPU_32":
        problems.append("timeout or machine type are not those of the guide")
    return problems


def main():
    check = {"lint": lint, "failures": check_failures, "layers": check_layers, "cloudbuild": check_cloudbuild}[sys.argv[1]]
    problems = [problem for path in sys.argv[2:] for problem in check(path)]
    for problem in problems:
        print(problem)
    return 1 if problems else 0


sys.exit(main())
