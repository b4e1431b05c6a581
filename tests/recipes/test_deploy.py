"""`deploy/`: the files fit each other, the checkout and the program's own arguments. No image is built here."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from lora_trainer.cli.main import main
from lora_trainer.config.schema import Config
from lora_trainer.core.io import user_cache_folder
from tests.recipes.recipe import Bench
from tests.test_docs import check_command_line

PROGRAM, LAUNCHER = "lora-trainer", "launch"
RETRIED, FINAL = 143, [2, 3, 4]  # docs/output.md
MANIFESTS = ("job", "several-nodes", "kueue", "batch", "gpu-sharing")


def instructions(checkout: Path) -> list[tuple[str, str]]:
    """The instructions of the Dockerfile in their order, each as its name and the rest, continued lines joined."""
    text = (checkout / "deploy" / "Dockerfile").read_text("utf-8")
    lines = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ").splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines if line)]


def sent_to_the_builder(checkout: Path, name: str) -> bool:
    """By .dockerignore: the last matching pattern counts."""
    lines = (checkout / ".dockerignore").read_text("utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    return [rule for rule in rules if fnmatch(name, rule.lstrip("!"))][-1].startswith("!")


def manifests(checkout: Path, name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((checkout / "deploy" / "kubernetes" / f"{name}.yaml").read_text("utf-8")))


def inside(document: object) -> Iterator[dict[str, Any]]:
    """Each mapping in a YAML document."""
    if isinstance(document, dict):
        yield document
    for value in document.values() if isinstance(document, dict) else document if isinstance(document, list) else ():
        yield from inside(value)


def pods(checkout: Path) -> list[tuple[str, dict[str, Any]]]:
    """The pods' spec in all manifests, each with its file."""
    found = [(name, each) for name in MANIFESTS for each in inside(manifests(checkout, name))]
    return [(name, each["template"]["spec"]) for name, each in found if "template" in each]


def command_lines(checkout: Path) -> dict[str, list[str]]:
    """The arguments of the program in each file of deploy/, by a name for messages."""
    found = {
        f"{name}: {container['name']}": [str(word) for word in container["args"]]
        for name, pod in pods(checkout)
        for container in pod["containers"]
        if container.get("command", [PROGRAM])[0] in (PROGRAM, LAUNCHER)
    }
    compose = yaml.safe_load((checkout / "deploy" / "compose.yaml").read_text("utf-8"))
    found |= {f"compose: {name}": service["command"] for name, service in compose["services"].items()}
    slurm = (checkout / "deploy" / "slurm.sh").read_text("utf-8")
    (arguments,) = re.findall(r"^ARGUMENTS=\((.*?)\)$", slurm, flags=re.M | re.S)
    return found | {"slurm": shlex.split(arguments)}


def test_every_command_line_is_accepted_by_the_program(checkout: Path) -> None:
    found = command_lines(checkout)
    assert len(found) == 8
    for name, words in found.items():
        check_command_line(words)
        assert words[0] not in ("train", "batch") or words[1] == "work" or "--resume" in words, f"{name} starts again"


def test_files_of_the_image_exist_and_are_sent(checkout: Path) -> None:
    copies = [shlex.split(rest) for name, rest in instructions(checkout) if name == "COPY"]
    copies = [[word for word in words if not word.startswith("--chmod")] for words in copies]
    sources = [source for words in copies if not words[0].startswith("--from") for source in words[:-1]]
    assert all((checkout / source).exists() for source in sources), sources
    assert all(sent_to_the_builder(checkout, source) for source in sources), sources
    unsent = (".git", ".venv", "tests", "runs", "README.md", "deploy/slurm.sh", ".env")
    assert not any(sent_to_the_builder(checkout, name) for name in unsent)
    project = tomllib.loads((checkout / "pyproject.toml").read_text("utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    built_from = {*wheel["only-include"], *wheel["force-include"], *project["project"]["license-files"]}
    needed = built_from | {"pyproject.toml", "deploy/launch.sh"}
    assert needed == set(sources)


def test_libraries_are_copied_and_installed_before_the_source(checkout: Path) -> None:
    steps = [f"{name} {rest}" for name, rest in instructions(checkout)]

    def first(pattern: str) -> int:
        return next(index for index, step in enumerate(steps) if re.search(pattern, step))

    order = (
        r"^COPY constraints\.txt",
        r"pip install .*torch==",
        r"^COPY pyproject\.toml",
        r"pip install .*-r requirements\.txt",
        r"^COPY presets",
        r"^COPY lora_trainer",
        r"pip install --no-deps \.",
    )
    assert [first(each) for each in order] == sorted(first(each) for each in order)
    assert all("--mount=type=cache" in step for step in steps if "pip install" in step or "apt-get" in step)
    for name, rest in instructions(checkout):
        if name == "COPY" and not rest.startswith("--from"):
            assert "." not in shlex.split(rest)[:-1], "the whole checkout would be copied with each change"


def test_the_image_installs_the_extras_of_its_commands(checkout: Path) -> None:
    """As the Dockerfile's own line lists them: those of GPUs by default, none of clusters."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text("utf-8"))["project"]
    settings = [dict(re.findall(r'(\w+)="(.*?)"', rest)) for _, rest in instructions(checkout) if "EXTRAS=" in rest]
    cuda, cpu = (set(each["EXTRAS"].split()) for each in settings)
    assert (cuda - cpu, cpu - cuda) == ({"gpu"}, set())
    assert set(project["optional-dependencies"]) - cuda == {"dev", "docs", "ocr", "ray", "slurm", "trackio"}
    assert [each["LIBRARIES"] for each in settings] == ["", "bitsandbytes"]
    (listing,) = [rest for name, rest in instructions(checkout) if name == "RUN" and "requirements.txt" in rest]
    code = re.search(r'python -c "(.*?)" > requirements.txt', listing)[1]  # type: ignore[index]
    for extras in (cuda, cpu):
        command = [sys.executable, "-c", code]
        environment = {**os.environ, "EXTRAS": " ".join(sorted(extras))}
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=True)
        wanted = [*project["dependencies"], *(x for name in extras for x in project["optional-dependencies"][name])]
        assert sorted(done.stdout.splitlines()) == sorted(wanted)
    steps = instructions(checkout)
    assert ("ARG", "DEVICE=cuda") in steps
    assert {"build AS torch-cuda", "build AS torch-cpu", "torch-${DEVICE} AS package"} <= {rest for _, rest in steps}


def test_the_image_runs_the_program_as_process_1_and_not_as_root(checkout: Path) -> None:
    steps = instructions(checkout)
    last = dict(steps)  # the last of each name: that of the final stage
    assert json.loads(last["ENTRYPOINT"]) == [PROGRAM]
    assert json.loads(last["CMD"]) == ["--help"]
    assert last["STOPSIGNAL"] == "SIGTERM"
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last["USER"]), "Kubernetes does not know that a name is not root"
    project = tomllib.loads((checkout / "pyproject.toml").read_text("utf-8"))["project"]
    assert PROGRAM in project["scripts"]
    text = (checkout / "deploy" / "Dockerfile").read_text("utf-8")
    assert not re.search(r"token|password|secret|api_?key", text, flags=re.I)
    images = {rest.split()[0] for name, rest in steps if name == "FROM"} - {"build"}
    assert images == {"python:3.11-slim-bookworm", "torch-${DEVICE}"}, "one interpreter in all stages, with a version"


def test_pods_are_complete(checkout: Path) -> None:
    dockerfile = dict(instructions(checkout))
    user = int(dockerfile["USER"].partition(":")[0])
    built = (checkout / "deploy" / "Dockerfile").read_text("utf-8")
    assert len(pods(checkout)) == 5
    for name, pod in pods(checkout):
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert pod["securityContext"] == {"runAsNonRoot": True, "fsGroup": user}, name
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes, name
            assert f"docker build -f deploy/Dockerfile -t {container['image']} ." in built
            mounts = tuple(mount["mountPath"] for mount in container["volumeMounts"])
            places = [word for word in map(str, container.get("args", [])) if word.startswith("/")]
            assert all(place.startswith(mounts) for place in places), name
            resources = container["resources"]
            assert {"cpu", "memory"} <= set(resources["requests"]), "Kueue counts what is requested"
            if "nvidia.com/gpu" in resources["limits"]:
                assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]


def test_a_stopped_run_has_time_to_save(checkout: Path) -> None:
    default = Config().train.grace_seconds

    def grace(words: list[str]) -> float:
        found = [float(word.partition("=")[2]) for word in words if word.startswith("train.grace_seconds=")]
        return found[-1] if found else default

    for name, pod in pods(checkout):
        if "terminationGracePeriodSeconds" in pod:
            assert grace(pod["containers"][0]["args"]) < pod["terminationGracePeriodSeconds"], name
    for service in yaml.safe_load((checkout / "deploy" / "compose.yaml").read_text("utf-8"))["services"].values():
        assert grace(service["command"]) < float(service["stop_grace_period"].removesuffix("s"))
    slurm = (checkout / "deploy" / "slurm.sh").read_text("utf-8")
    (before_the_end,) = re.findall(r"^#SBATCH --signal=USR1@(\d+)$", slurm, flags=re.M)
    assert grace(command_lines(checkout)["slurm"]) < float(before_the_end)


def test_jobs_are_tried_again_by_the_exit_code(checkout: Path) -> None:
    policies = [each for name in MANIFESTS for each in inside(manifests(checkout, name)) if "podFailurePolicy" in each]
    assert len(policies) == 3
    for job in policies:
        assert job["template"]["spec"]["restartPolicy"] == "Never", "else Kubernetes allows no policy"
        (container,) = job["template"]["spec"]["containers"]
        actions: dict[int, str] = {}
        for rule in job["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes", {"values": [], "containerName": container["name"]})
            assert codes["containerName"] == container["name"]
            actions |= {code: rule["action"] for code in codes["values"] if code not in actions}
        assert actions[RETRIED] == "Ignore"
        final = (
            [2] if container["args"][:2] == ["batch", "work"] else FINAL
        )  # a worker ends with 0 however its jobs end
        assert [code for code, action in actions.items() if action == "FailJob"] == final


def test_what_manifests_name_exists_in_them(checkout: Path) -> None:
    documents = {name: manifests(checkout, name) for name in MANIFESTS}
    by_kind: dict[tuple[str, str], dict[str, Any]] = {
        (each["kind"], each["metadata"]["name"]): each for name in MANIFESTS for each in documents[name]
    }
    queues = {each["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] for each in inside_jobs(by_kind)}
    assert queues == {"lora"}
    cluster_queue = by_kind["ClusterQueue", by_kind["LocalQueue", "lora"]["spec"]["clusterQueue"]]
    (group,) = cluster_queue["spec"]["resourceGroups"]
    for flavor in group["flavors"]:
        assert ("ResourceFlavor", flavor["name"]) in by_kind
        assert [each["name"] for each in flavor["resources"]] == group["coveredResources"]
    worker = by_kind["ScaledJob", "lora-batch-worker"]["spec"]
    (trigger,) = worker["triggers"]
    host, port, file = re.fullmatch(r"http://([\w-]+)\.\S+:(\d+)/(.*)", trigger["metadata"]["url"]).groups()  # type: ignore[union-attr]
    (listed,) = by_kind["Service", host]["spec"]["ports"]
    assert (listed["port"], file) == (int(port), "batch.json")
    for kind, name in by_kind:
        if kind in ("Service", "Deployment", "NetworkPolicy"):
            spec = by_kind[kind, name]["spec"]
            selector = spec.get("podSelector", spec.get("selector", {}))
            assert (selector.get("matchLabels") or selector) in labels_of_pods(by_kind), (kind, name)
    spread = by_kind["Job", "lora-cat-large"]["spec"]
    environment = {each["name"]: each.get("value") for each in spread["template"]["spec"]["containers"][0]["env"]}
    assert int(environment["NODES"]) == spread["completions"] == spread["parallelism"]
    assert environment["MASTER_ADDR"] == f"lora-cat-large-0.{spread['template']['spec']['subdomain']}"
    assert {environment["PROCESSES"]} == {
        str(each["nvidia.com/gpu"]) for each in inside(spread) if "nvidia.com/gpu" in each
    }
    claims = {each["claimName"] for each in inside(documents["batch"]) if "claimName" in each}
    assert all(("PersistentVolumeClaim", claim) in by_kind for claim in claims)
    for configuration in by_kind["ConfigMap", "lora-gpu-sharing"]["data"].values():
        assert yaml.safe_load(configuration)["version"] == "v1"


def inside_jobs(by_kind: dict[tuple[str, str], dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for (kind, _), each in by_kind.items() if kind == "Job"]


def labels_of_pods(by_kind: dict[tuple[str, str], dict[str, Any]]) -> list[dict[str, str]]:
    templates = [each["template"] for each in inside(list(by_kind.values())) if "template" in each]
    return [template["metadata"]["labels"] for template in templates if "metadata" in template]


def test_the_autoscaler_reads_what_a_batch_writes(checkout: Path, bench: Bench, tmp_path: Path, capsys) -> None:
    fill, work = (command_lines(checkout)[f"batch: {name}"] for name in ("fill", "work"))
    shutil.copytree(bench.data, tmp_path / "customers" / "ash")
    places = {"/data/customers": tmp_path / "customers", "/data/my-sd15": bench.model, "/data/night": bench.output}
    assert main([str(places.get(word, word)) for word in fill]) == 0
    (trigger,) = manifests(checkout, "batch")[-1]["spec"]["triggers"]
    document = json.loads((bench.output / "batch.json").read_text("utf-8"))
    assert document[trigger["metadata"]["valueLocation"]] == 1
    assert work[2] in places, "the worker looks where the queue is filled"
    assert main([str(places.get(word, word)) for word in fill]) == 0, "the next time"


def test_the_job_of_kubernetes_reads_its_data(checkout: Path, bench: Bench, tmp_path: Path, capsys) -> None:
    places = {"/data/images": bench.data, "/data/my-sd15": bench.model, "/data/runs": tmp_path}
    arguments = [str(places.get(word, word)) for word in command_lines(checkout)["job: train"]]
    assert main([*arguments, "--dry-run"]) == 0
    assert "10 images" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="bash")
@pytest.mark.parametrize("name", ["launch.sh", "slurm.sh"])
def test_scripts_are_valid_bash(name: str, checkout: Path) -> None:
    subprocess.run(["bash", "-n", str(checkout / "deploy" / name)], check=True)


FAKE = """#!/usr/bin/env bash
trap 'exit $((128 + 15))' TERM
echo "rank $RANK of $WORLD_SIZE, here $LOCAL_RANK of $LOCAL_WORLD_SIZE, $MASTER_ADDR: $*"
case "$RANK:$1" in
    1:fail) exit 3 ;;
    1:stop) kill -s TERM "$(ps -o ppid= -p $$ | tr -d ' ')" ;;
    *:fail | *:train) exit 0 ;;
esac
while true; do sleep 0.05; done
"""


@pytest.mark.skipif(sys.platform != "linux", reason="bash")
@pytest.mark.parametrize(("what", "code"), [("train", 0), ("fail", 3), ("stop", 143)])
def test_the_launcher_starts_processes_and_has_their_exit_code(what, code, checkout, tmp_path) -> None:
    program = tmp_path / PROGRAM
    program.write_text(FAKE, encoding="utf-8")
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PROCESSES": "2", "NODES": "2", "NODE": "0"}
    launcher = ["bash", str(checkout / "deploy" / "launch.sh"), what]
    ended = subprocess.run(launcher, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == code, ended.stderr
    lines = [f"rank {rank} of 4, here {rank} of 2, 127.0.0.1: {what}" for rank in range(2)]
    assert sorted(ended.stdout.splitlines()) == lines
    assert ended.stderr == ""


@pytest.mark.skipif(sys.platform != "linux", reason="users of POSIX")
def test_a_user_without_name_and_home_has_a_cache(monkeypatch, tmp_path) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "LORA_TRAINER_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert user_cache_folder() == tmp_path / f"home-{os.getuid()}" / ".cache" / "lora-trainer"
