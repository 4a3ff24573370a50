"""What this machine has, without importing anything that would take a GPU: cores, memory, GPUs."""

import os
import subprocess

from rollart.types import Node

VISIBLE = "CUDA_VISIBLE_DEVICES"


def this_machine() -> Node:
    """Workers of `local` and `inline` all run here and share the cores, so only a missing GPU is a lack."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cores = len(os.sched_getaffinity(0))
    return Node(
        name="this machine",
        resources={"CPU": float(cores), "GPU": float(len(devices())), "memory": float(pages)},
        taken_on_trust=True,
    )


def devices() -> list[str]:
    """The GPUs that this process may use, by the names CUDA_VISIBLE_DEVICES knows them by."""
    there = [str(number) for number in range(len(gpus()))]
    visible = os.environ.get(VISIBLE)
    if visible is None or not there:
        return there
    return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]


def gpus() -> list[str]:
    """The GPUs that nvidia-smi lists; none where there is no nvidia-smi."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listed.stdout.splitlines() if line.strip()]
