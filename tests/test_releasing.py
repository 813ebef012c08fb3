"""The places that name a version or the dependencies agree, and links work on an index."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import xckpt
from tests.test_packaging import CONDA_NAMES, split
from torture.links import absolute_links, with_urls

ROOT = Path(__file__).parents[1]


def recipe() -> str:
    return (ROOT / "recipe/meta.yaml").read_text(encoding="utf-8")


@pytest.mark.skipif("dev" in xckpt.__version__, reason="this is not a release")
def test_all_places_name_the_same_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == xckpt.__version__
    assert f'set version = "{xckpt.__version__}"' in recipe()
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heading = f"\n## [{xckpt.__version__}] - {citation['date-released']}\n"
    assert heading in changes


def test_the_recipe_has_the_dependencies_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    expected = {
        CONDA_NAMES.get(name, name): bound for name, bound in map(split, project["dependencies"])
    }
    run = recipe().partition("\n  run:\n")[2].partition("\n\n")[0]
    requirements = dict(re.findall(r"- (\S+) (>=[\d.]+)$", run, re.MULTILINE))
    assert requirements == expected
    lowest = (ROOT / "recipe/conda_build_config.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(lowest)["python_min"] == [project["requires-python"].removeprefix(">=")]
    assert f"summary: {project['description']}\n" in recipe()


def test_workflows_are_yaml_that_runs_existing_commands() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    paths = [*(ROOT / ".github/workflows").glob("*.yml")]
    assert paths
    for path in paths:
        jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
        commands = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
        for target in re.findall(r"make ([\w-]+)", "\n".join(commands)):
            assert f"\n{target}:" in makefile


def test_workflows_test_every_python_of_the_classifiers() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    classifiers = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    assert set(classifiers) == set(re.findall(r'"(3\.\d+)"', workflow))
    assert project["requires-python"] == f">={classifiers[0]}"


def test_absolute_links_lead_to_the_tag() -> None:
    text = (
        "![a](docs/a.png) [b](docs/b.md#c) [`d`](docs/d.md), read\n"
        "[e](https://e.org/x) [f](#f) [g](mailto:g@example.org)\n"
    )
    url = "https://github.com/o/xckpt"
    assert absolute_links(text, url, "v1.2") == (
        f"![a]({url}/raw/v1.2/docs/a.png) [b]({url}/blob/v1.2/docs/b.md#c)"
        f" [`d`]({url}/blob/v1.2/docs/d.md), read\n"
        "[e](https://e.org/x) [f](#f) [g](mailto:g@example.org)\n"
    )


def test_every_link_of_the_readme_becomes_absolute() -> None:
    page = absolute_links((ROOT / "README.md").read_text(encoding="utf-8"), "https://h/o/x", "v1")
    targets = re.findall(r"\]\(([^)]+)\)", page)
    assert targets
    assert [target for target in targets if not re.match(r"https?://|#", target)] == []
    for path in re.findall(r"https://h/o/x/(?:raw|blob)/v1/([^)#]+)", page):
        assert (ROOT / path).exists(), path


def test_a_release_has_the_addresses_of_its_repository() -> None:
    before = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    after = tomllib.loads(with_urls(before, "https://h/o/x", "v1"))
    urls = after["project"].pop("urls")
    assert after == tomllib.loads(before)
    assert urls["Source"] == "https://h/o/x"
    for address in urls.values():
        path = address.partition("/blob/v1/")[2]
        assert (ROOT / path).exists(), address
