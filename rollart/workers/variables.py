"""Which environment variables a child process that runs user code is given: those that programs need, and no secrets.

An allow-list: what is not known to be harmless is left out, whatever it is called. What an environment or a reward
needs beyond that its job names (`tasks.N.environment`, `rewards.environment`). This keeps keys out of what user code
prints, sends or passes on; it is not a wall: a process of the same user can find other ways.
"""

from collections.abc import Mapping, Sequence

NAMES = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "LANG", "LANGUAGE"),
        *("TMPDIR", "TEMP", "TMP", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "DISPLAY"),
        *("LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "JAVA_HOME"),
        *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
        *("TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    }
)
PREFIXES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "NUMEXPR_", "CUDA", "NVIDIA_")
SECRET_ENDINGS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS")
"""Never given because of a prefix; only where the job names the variable itself."""


def for_children(environment: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """What of `environment` a child gets. `named`: those that the job names."""
    wanted = set(named)
    return {name: value for name, value in environment.items() if name in wanted or _harmless(name)}


def _harmless(name: str) -> bool:
    return name in NAMES or (name.startswith(PREFIXES) and not name.upper().endswith(SECRET_ENDINGS))
