#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check a JSON document against a JSON schema (draft 2020-12).

usage: validate.py SCHEMA [DOCUMENT]

DOCUMENT is read from standard input if not named. Knows the keywords that epkit's schemas use and refuses a schema
with any other, so that nothing goes unchecked. Prints one line for each fault and exits with 1 if there is any.
"""
import json
import os
import re
import sys

ANNOTATIONS = {"$schema", "$id", "$defs", "$comment", "title", "description", "examples"}
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
}


def has_type(value, name):
    if name == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if name == "number":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, TYPES[name])


def same(a, b):
    """Equal, and not only because Python takes true for 1."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def load(path):
    """A schema and its folder, to which references to other files are relative."""
    with open(path, encoding="utf-8") as file:
        return json.load(file), os.path.dirname(path)


def resolve(root, reference):
    """What the reference names, and the schema that contains it."""
    name, _, path = reference.partition("#/")
    if name:
        root = load(os.path.join(root[1], name))
    node = root[0]
    for part in path.split("/"):
        node = node[part]
    return node, root


def check_object(value, schema, root, where):
    properties = schema.get("properties", {})
    for name in schema.get("required", []):
        if name not in value:
            yield f"{where}: '{name}' is missing"
    for name, item in value.items():
        if name in properties:
            yield from check(item, properties[name], root, f"{where}.{name}")
        elif schema.get("additionalProperties", True) is False:
            yield f"{where}: '{name}' is not in the schema"
        elif isinstance(schema.get("additionalProperties"), dict):
            yield from check(item, schema["additionalProperties"], root, f"{where}.{name}")


def check_array(value, schema, root, where):
    if len(value) < schema.get("minItems", 0):
        yield f"{where}: fewer than {schema['minItems']} items"
    if len(value) > schema.get("maxItems", len(value)):
        yield f"{where}: more than {schema['maxItems']} items"
    if "items" in schema:
        for i, item in enumerate(value):
            yield from check(item, schema["items"], root, f"{where}[{i}]")


def check_any_of(value, schema, root, where):
    faults = [list(check(value, option, root, where)) for option in schema["anyOf"]]
    if all(faults):
        yield f"{where}: fits none of anyOf: " + "; ".join(fault[0] for fault in faults)


def check_number(value, schema, _root, where):
    if value < schema.get("minimum", value):
        yield f"{where}: {value} is below {schema['minimum']}"
    if value > schema.get("maximum", value):
        yield f"{where}: {value} is above {schema['maximum']}"
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        yield f"{where}: {value} is not above {schema['exclusiveMinimum']}"


def check_string(value, schema, _root, where):
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{where}: '{value}' does not match {schema['pattern']}"
    if len(value) < schema.get("minLength", 0):
        yield f"{where}: shorter than {schema['minLength']}"


# keywords: the type of value that they speak of, and what checks them
KEYWORDS = [
    ({"properties", "required", "additionalProperties"}, "object", check_object),
    ({"items", "minItems", "maxItems"}, "array", check_array),
    ({"minimum", "maximum", "exclusiveMinimum"}, "number", check_number),
    ({"pattern", "minLength"}, "string", check_string),
]
KNOWN = ANNOTATIONS.union({"type", "const", "enum", "anyOf", "$ref"}, *(names for names, _, _ in KEYWORDS))


def check(value, schema, root, where="$"):
    unknown = set(schema) - KNOWN
    if unknown:
        raise ValueError(f"{where}: keywords that this validator does not know: {', '.join(sorted(unknown))}")
    if "$ref" in schema:
        yield from check(value, *resolve(root, schema["$ref"]), where)
    types = schema.get("type")
    if types is not None:
        types = [types] if isinstance(types, str) else types
        if not any(has_type(value, name) for name in types):
            yield f"{where}: {json.dumps(value)[:60]} is not of type {' or '.join(types)}"
            return
    if "const" in schema and not same(value, schema["const"]):
        yield f"{where}: {json.dumps(value)[:60]} is not {json.dumps(schema['const'])}"
    if "enum" in schema and not any(same(value, option) for option in schema["enum"]):
        yield f"{where}: {json.dumps(value)[:60]} is none of {json.dumps(schema['enum'])}"
    if "anyOf" in schema:
        yield from check_any_of(value, schema, root, where)
    for names, kind, checker in KEYWORDS:
        if names & set(schema) and has_type(value, kind):
            yield from checker(value, schema, root, where)


def refuse_constant(name):
    raise ValueError(f"{name} is not JSON")


def main():
    root = load(sys.argv[1])
    if root[0].get("$schema") != "https://json-schema.org/draft/2020-12/schema":
        raise ValueError(f"{sys.argv[1]}: not a schema of draft 2020-12")
    if len(sys.argv) > 2:
        with open(sys.argv[2], encoding="utf-8") as file:
            text = file.read()
    else:
        text = sys.stdin.read()
    faults = list(check(json.loads(text, parse_constant=refuse_constant), root[0], root))
    for fault in faults:
        print(fault)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
