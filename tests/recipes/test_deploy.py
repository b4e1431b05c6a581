"""`deploy/`: the image's files exist, and Kubernetes runs what the image has. No image is built here."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import yaml

from lora_trainer.cli.main import main
from tests.recipes.recipe import Bench


def instructions(checkout: Path) -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, split into words, continued lines joined."""
    text = (checkout / "deploy" / "Dockerfile").read_text("utf-8")
    lines = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ").splitlines()
    return [(name, words.strip()) for name, _, words in (line.partition(" ") for line in lines if line)]


def sent_to_the_builder(checkout: Path, name: str) -> bool:
    """By .dockerignore: the last matching pattern counts."""
    lines = (checkout / ".dockerignore").read_text("utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    return [rule for rule in rules if fnmatch(name, rule.lstrip("!"))][-1].startswith("!")


def test_files_of_the_container_image_exist_and_are_sent(checkout: Path) -> None:
    copies = [shlex.split(words) for name, words in instructions(checkout) if name == "COPY"]
    sources = [source for words in copies if not words[0].startswith("--from") for source in words[:-1]]
    assert all((checkout / source).exists() for source in sources), sources
    assert all(sent_to_the_builder(checkout, source) for source in sources), sources
    assert not any(sent_to_the_builder(checkout, name) for name in (".git", ".venv", "tests", "runs", "README.md"))
    project = tomllib.loads((checkout / "pyproject.toml").read_text("utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    assert {*wheel, *project["project"]["license-files"], "constraints.txt", "pyproject.toml"} == set(sources)


def test_kubernetes_commands_exist_in_the_image(checkout: Path, bench: Bench, tmp_path: Path, capsys) -> None:
    job = yaml.safe_load((checkout / "deploy" / "kubernetes.yaml").read_text("utf-8"))
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    built = (checkout / "deploy" / "Dockerfile").read_text("utf-8")
    assert f"docker build -f deploy/Dockerfile -t {container['image']} ." in built
    words = dict(instructions(checkout))  # the last of each name: that of the final stage
    (program,) = json.loads(words["ENTRYPOINT"])
    project = tomllib.loads((checkout / "pyproject.toml").read_text("utf-8"))["project"]
    assert program in project["scripts"]
    assert "command" not in container, "it would take the place of the image's"
    user = words["USER"].partition(":")[0]
    assert pod["securityContext"] == {"runAsNonRoot": True, "fsGroup": int(user)}, "a name is not known to be no root"

    places = {"/data/images": bench.data, "/data/my-sd15": bench.model, "/data/runs": tmp_path}
    assert all(place.startswith(container["volumeMounts"][0]["mountPath"]) for place in places)
    arguments = [str(places.get(each, each)) for each in container["args"]]
    assert main([*arguments, "--dry-run", "--explain"]) == 0
    (grace,) = re.findall(r"train\.grace_seconds +(\d+)", capsys.readouterr().out)
    assert int(grace) < pod["terminationGracePeriodSeconds"]
