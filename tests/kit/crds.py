"""Strict validation of Kubernetes manifests without a cluster, like `kubectl apply --validate=strict`.

Custom resources are validated by the CRDs in `crd_schemas/`, all others by the schemas in `kubernetes-validate`.
Unknown fields are errors. Not checked: rules about changes (`oldSelf`), and webhooks.

`python -m tests.kit.crds CRD.yaml ...` writes `crd_schemas/` from an operator's CRD files.
"""

import functools
import gzip
import json
import re
import sys
from pathlib import Path

import celpy
import celpy.adapter
import jsonschema
import kubernetes_validate
import yaml

SCHEMAS = Path(__file__).parent / "crd_schemas"
KUBERNETES = "1.35"
INTEGERS = {"int32": 2**31, "int64": 2**63}


def problems(document):
    """Why the API server would reject a manifest, one sentence per problem."""
    metadata = document.get("metadata", {})
    found = _core({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})  # it has the same metadata
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", metadata.get("name", "")):
        found.append(".metadata.name: not a DNS subdomain")
    if not (SCHEMAS / f"{document['kind']}.json.gz").exists():
        return found + _core(document)
    api_version, schema, validator = _crd(document["kind"])
    if document["apiVersion"] != api_version:
        found.append(f".apiVersion: {document['apiVersion']}, not {api_version}")
    found += [_sentence(error) for error in validator.iter_errors(document)]
    return found + list(_broken_rules(schema, document, ""))


@functools.cache
def _crd(kind):
    """The CRD's apiVersion, its schema, and a validator for it."""
    crd = json.loads(gzip.decompress((SCHEMAS / f"{kind}.json.gz").read_bytes()))
    return crd["apiVersion"], crd["schema"], jsonschema.Draft202012Validator(_strict(crd["schema"]))


def _core(document):
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [_sentence(error)]
    except kubernetes_validate.SchemaNotFoundError:
        return [f".: {document['apiVersion']} has no {document['kind']} that is known here"]
    return []


def _sentence(error):
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
    return f"{where or '.'}: {error.message[:300]}"


def _strict(schema, *, root=True):
    """A CRD's schema as a JSON Schema that refuses unknown fields."""
    strict = dict(schema)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            strict[key] = _strict(schema[key], root=False)
    properties = schema.get("properties", {})
    strict["properties"] = {name: _strict(each, root=False) for name, each in properties.items()}
    if root:
        strict["properties"]["metadata"] = {"type": "object"}
    if "required" in schema:  # the server fills in defaults first
        strict["required"] = [name for name in schema["required"] if "default" not in properties.get(name, {})]
    if schema.get("type") == "object":
        strict.setdefault("additionalProperties", False)
    if schema.get("format") in INTEGERS:
        limit = INTEGERS[schema["format"]]
        strict = {"minimum": -limit, "maximum": limit - 1, **strict}
    return strict


def _broken_rules(schema, value, path):
    """Violations of rules outside JSON Schema: duplicates in lists, and CEL rules."""
    for rule in schema.get("x-kubernetes-validations", []):
        if "oldSelf" not in rule["rule"] and not _holds(rule["rule"], value):
            yield f"{path}: {rule.get('message', rule['rule'])}"
    if isinstance(value, dict):
        for name, child in value.items():
            below = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
            if isinstance(below, dict):
                yield from _broken_rules(below, child, f"{path}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _broken_rules(schema["items"], item, f"{path}[{index}]")
        yield from _duplicates(schema, value, path)


def _duplicates(schema, items, path):
    if schema.get("x-kubernetes-list-type") not in {"map", "set"}:
        return
    properties = schema["items"].get("properties", {})
    names = schema.get("x-kubernetes-list-map-keys")
    seen = []
    for index, item in enumerate(items):
        key = [item.get(name, properties[name].get("default")) for name in names] if names else item
        if key in seen:
            yield f"{path}[{index}]: {key} is there twice"
        seen.append(key)


def _holds(rule, value):
    environment = celpy.Environment()
    program = environment.program(environment.compile(rule))
    return bool(program.evaluate({"self": celpy.adapter.json_to_cel(value)}))


def _vendor(files):
    """Write version v1 of each CRD: the part that users write, without descriptions."""
    for file in files:
        spec = yaml.load(Path(file).read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)["spec"]
        (version,) = [version for version in spec["versions"] if version["name"] == "v1"]
        schema = version["schema"]["openAPIV3Schema"]
        del schema["properties"]["status"]
        kept = {"apiVersion": f"{spec['group']}/v1", "schema": _without_descriptions(schema)}
        packed = gzip.compress(json.dumps(kept, separators=(",", ":")).encode(), mtime=0)
        (SCHEMAS / f"{spec['names']['kind']}.json.gz").write_bytes(packed)


def _without_descriptions(schema):
    if not isinstance(schema, dict):
        return schema
    kept = {key: _without_descriptions(value) for key, value in schema.items() if key != "description"}
    if "properties" in schema:  # where a field may have that name
        kept["properties"] = {name: _without_descriptions(each) for name, each in schema["properties"].items()}
    return kept


if __name__ == "__main__":
    _vendor(sys.argv[1:])
