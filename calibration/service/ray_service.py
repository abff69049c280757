"""A KubeRay RayService, whose Serve config a calibration in a pod of its namespace changes.

Uses the standard library, because Ray's images have no client for Kubernetes.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from calibration.service.application import Application, CalibrationFailed
from calibration.service.config_file import ConfigFile
from deployments.errors import SettingsError

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where Kubernetes puts it into a pod
_TIMEOUT_S = 30.0
_ATTEMPTS = 5  # KubeRay writes the resource's status, and each write makes a new version
_CONFLICT = 409  # the version that was read is no longer the latest
_PROBLEMS = {
    403: "the pod's ServiceAccount may not {} it: apply k8s/calibration/rbac.yaml, whose Role names the RayService",
    404: "there is none to {}: apply the service first, or correct --rayservice",
}


@dataclass(slots=True)
class RayService:
    """`url`: at the API server. `account`: folder with the token and ca.crt. `text`: the Serve config as read last."""

    name: str
    url: str
    account: Path
    text: str = ""

    @classmethod
    def beside_this_pod(cls, name: str, account: Path = _ACCOUNT) -> RayService:
        """The one in this pod's namespace. Raises SettingsError if this is no pod with a ServiceAccount's token."""
        try:
            host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
            namespace = (account / "namespace").read_text().strip()
        except (KeyError, OSError):
            raise SettingsError(
                "--rayservice", f"requires a pod with a ServiceAccount's token in {account}; elsewhere use --config"
            ) from None
        server = f"https://{f'[{host}]' if ':' in host else host}:{port}"
        return cls(name, f"{server}/apis/ray.io/v1/namespaces/{namespace}/rayservices/{name}", account)

    def edited(self, application: Application, changes: Mapping[str, Any]) -> str:
        """The Serve config with the changes. Raises SettingsError as `ConfigFile.edited` does."""
        return ConfigFile(Path(f"rayservice/{self.name}"), self.text, application).edited(changes)

    def change(self, application: Application, changes: Mapping[str, Any], *, dry_run: bool = False) -> str:
        """Write the Serve config, and return it. Raises CalibrationFailed, or SettingsError as `edited` does.

        The write names the version that was read, so that a change by someone else meanwhile is read and kept.
        `dry_run`: the API server checks permission and content, and stores nothing.
        """
        for _ in range(_ATTEMPTS):
            found = self._call("get")
            self.text = found["spec"].get("serveConfigV2") or ""
            after, version = self.edited(application, changes), found["metadata"]["resourceVersion"]
            patch = {"metadata": {"resourceVersion": version}, "spec": {"serveConfigV2": after}}
            if self._call("patch", "?fieldManager=windve-calibration" + "&dryRun=All" * dry_run, patch):
                return after
        raise CalibrationFailed(f"rayservice/{self.name} changed {_ATTEMPTS} times while it was written")

    def _call(self, verb: str, query: str = "", patch: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer; empty where there is a conflict. Raises CalibrationFailed."""
        try:
            token = (self.account / "token").read_text().strip()  # at each call, because kubelet renews it
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/merge-patch+json"}
            tls = HTTPSHandler(context=ssl.create_default_context(cafile=str(self.account / "ca.crt")))
            body = json.dumps(patch).encode() if patch else None
            request = Request(self.url + query, body, headers, method=verb.upper())  # noqa: S310 - our own scheme
            with build_opener(ProxyHandler({}), tls).open(request, timeout=_TIMEOUT_S) as answer:
                return dict(json.load(answer))
        except HTTPError as error:
            error.close()
            if error.code == _CONFLICT:
                return {}
            known = _PROBLEMS.get(error.code)
            problem = known.format(verb) if known else f"refused to {verb}: {error.code} {error.reason}"
        except (OSError, ValueError, HTTPException) as error:
            problem = f"the API server cannot be asked: {error}"
        raise CalibrationFailed(f"rayservice/{self.name}, {self.url}: {problem}")
