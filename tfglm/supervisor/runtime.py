"""How an engine is run on this node: in a virtual environment, or in a container. Command lines and nothing else."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from tfglm.settings import ENV_PREFIX, env_name
from tfglm.supervisor.child import MARK, mark_of
from tfglm.supervisor.cluster import Cluster, Node

START = "GLM_START"
SECRET = env_name("api_key")
_DOCKER_S = 20.0
_AGAIN_S = 0.1
_LABEL = "tfglm"


class Runtime:
    """`argv` and `environment` of what `tfglm rank run` starts on a node."""

    def __init__(self, cluster: Cluster, node: Node) -> None:
        self.cluster, self.node = cluster, node
        self.mark = mark_of(cluster.name, node.rank)

    def engine(self, generation: int, network: Mapping[str, str]) -> list[str]:
        """The command line of the engine. network: `fabric.engine_environment`."""
        cluster, ranks = self.cluster, len(self.cluster.ranks)
        leader = cluster.ranks[0].control
        leader = f"[{leader}]" if ":" in leader else leader
        words = ["engine", cluster.checkpoint, "--rank", str(self.node.rank), "--ranks", str(ranks)]
        words += ["--leader", f"{leader}:{cluster.ports.rendezvous}"]
        if cluster.runtime == "venv":
            return [*cluster.command, *words]
        return self._container(words, self.engine_variables(generation, network), generation)

    def engine_shown(self, generation: int, network: Mapping[str, str]) -> str:
        """The same as one would type it, with the variables that a container does not get by its command line."""
        variables = self.engine_variables(generation, network) if self.cluster.runtime == "venv" else {}
        words = [f"{name}={shlex.quote(value)}" for name, value in sorted(variables.items())]
        return " ".join([*words, shlex.join(self.engine(generation, network))])

    def trial(self, config: Path, network: Mapping[str, str]) -> list[str]:
        """The command line of this rank's part of `tfglm doctor`, inside a container beside the engine's."""
        words = ["doctor", "--rank", str(self.node.rank), "--config", str(config)]
        return self._container(words, dict(network), 0, f"{config}:{config}:ro")

    def plan(self) -> list[str]:
        """The command line of the memory plan, which loads nothing and needs neither GPU nor network."""
        words = ["plan", self.cluster.checkpoint, "--json", "--ranks", str(len(self.cluster.ranks))]
        if self.cluster.runtime == "venv":
            return [*self.cluster.command, *words]
        entry, *rest = self.cluster.command
        limits = ["--rm", "--network", "none", "--memory", "3g", "--entrypoint", entry]
        image = [self.cluster.docker.image, *rest, *words]
        return ["docker", "run", *limits, *self._volumes(), *_given(self.settings()), *image]

    def settings(self) -> dict[str, str]:
        """The cluster's settings as environment variables."""
        return {env_name(name): value for name, value in self.cluster.settings.items()}

    def engine_variables(self, generation: int, network: Mapping[str, str]) -> dict[str, str]:
        """What the engine's environment has beside the supervisor's own. The supervisor's guard replaces the engine's:
        two would act on one shortage. The engines of a start compare its number when they meet."""
        own = {env_name("guard_gib"): "0", START: str(generation)}
        return self.settings() | own | dict(network) | dict(self.cluster.environment)

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of a child. Settings come from cluster.json alone; the API key from the credential that
        systemd passed, or the supervisor's own environment."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
        key = api_key()
        return own | ({SECRET: key} if key else {}) | dict(variables)

    def remove(self) -> list[str]:
        """Kill and remove containers of this cluster and rank, and no others; their name is free then. Returns their
        ids. Raises OSError and subprocess errors."""
        if self.cluster.runtime != "docker":
            return []
        labels = [f"--filter=label={name}" for name in self._labels()]
        found: dict[str, None] = {}
        deadline, said = time.monotonic() + _DOCKER_S, ""
        while here := _docker("ps", "--all", "--quiet", *labels).split():
            found |= dict.fromkeys(here)
            if time.monotonic() > deadline:
                raise TimeoutError(f"docker has not removed {' '.join(here)} within {_DOCKER_S:.0f} s{said}")
            # Fails for one that ended and is being removed by docker itself; it is gone in a moment, too.
            words = ["docker", "rm", "--force", *here]
            done = subprocess.run(words, capture_output=True, text=True, timeout=_DOCKER_S, check=False)
            said = f": {done.stderr.strip()}" if done.returncode else ""
            time.sleep(_AGAIN_S)
        return list(found)

    def image_problem(self) -> str:
        """What is wrong with the image on this node; empty when nothing is, and without containers."""
        if self.cluster.runtime != "docker":
            return ""
        docker = self.cluster.docker
        try:
            label = _docker(
                "image", "inspect", "--format", f'{{{{index .Config.Labels "{_LABEL}.hash"}}}}', docker.image
            )
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", "") or str(error)
            return f"image {docker.image} is not on this node, or docker does not answer: {said.strip()}"
        found = label.strip() or "none"
        if docker.image_hash and found != docker.image_hash:
            return f"image {docker.image} has content hash {found}; cluster.json says {docker.image_hash}"
        return ""

    def _labels(self) -> list[str]:
        return [f"{_LABEL}.cluster={self.cluster.name}", f"{_LABEL}.rank={self.node.rank}"]

    def _container(self, words: list[str], variables: Mapping[str, str], generation: int, *volumes: str) -> list[str]:
        """docker run in the foreground: its exit code is the engine's, its output goes where the supervisor's goes.
        Generation 0 is a trial."""
        docker = self.cluster.docker
        labels = [*self._labels(), f"{_LABEL}.generation={generation}", f"{_LABEL}.settings={self.cluster.digest}"]
        argv = [
            "docker",
            "run",
            "--rm",
            "--name",
            f"{_LABEL}-{self.cluster.name}-{self.node.rank}{'' if generation else '-trial'}",
        ]
        argv += [f"--label={label}" for label in labels]
        argv += ["--network", "host", "--ipc", "host", "--log-driver", "none", "--ulimit", "stack=67108864"]
        argv += ["--user", docker.user or f"{os.getuid()}:{os.getgid()}"]
        argv += {"cdi": ["--device", "nvidia.com/gpu=all"], "legacy": ["--gpus", "all"], "none": []}[docker.gpus]
        if any(rail.rdma for rail in self.node.rails):  # whose memory is pinned
            argv += ["--device", "/dev/infiniband", "--cap-add", "IPC_LOCK", "--ulimit", "memlock=-1"]
        argv += ["--memory", docker.memory] if docker.memory else []
        argv += self._volumes(f"{docker.cache}:/cache", *volumes)
        # By name: a value on a command line is everybody's to read.
        argv += ["--env", SECRET] if api_key() else []
        argv += _given({**variables, MARK: self.mark, "HF_HUB_OFFLINE": "1"})
        entry, *rest = self.cluster.command
        return [*argv, "--entrypoint", entry, docker.image, *rest, *words]

    def _volumes(self, *more: str) -> list[str]:
        """The mount that holds the checkpoint, or its folder: read-only, under the same path; and what else was asked
        for, where a drafter may lie. A snapshot in a Hugging Face cache is links to elsewhere in that cache, which a
        container needs as a whole."""
        path = Path(self.cluster.checkpoint)
        cache = next((folder.parent.parent for folder in path.parents if folder.name.startswith("models--")), path)
        source = self.node.mount or cache
        volumes = (f"{source}:{source}:ro", *more, *self.cluster.docker.volumes)
        return [word for volume in volumes for word in ("--volume", volume)]


def api_key() -> str:
    """The key clients must send: systemd's credential api_key, else the environment; empty without one."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY", "")
    path = Path(folder) / "api_key"
    if folder and path.exists():
        return path.read_text().strip()
    return os.environ.get(SECRET, "")


def _given(variables: Mapping[str, str]) -> list[str]:
    return [word for name, value in sorted(variables.items()) for word in ("--env", f"{name}={value}")]


def _docker(*words: str) -> str:
    """docker's answer. Raises OSError and subprocess errors; never waits longer than _DOCKER_S."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=_DOCKER_S, check=True)
    return done.stdout
