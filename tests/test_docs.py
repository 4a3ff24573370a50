"""The generated page is what its script makes now, and its example is a job."""

import yaml

from rollart.config.load import build_job, warnings
from scripts.job_reference import EXAMPLE, PAGE, render


def test_the_job_reference_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run `make docs`"


def test_the_example_is_a_job() -> None:
    assert warnings(build_job(yaml.safe_load(EXAMPLE))) == []
