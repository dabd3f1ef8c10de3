"""The lock file and the recipe for conda say what pyproject.toml and constraints.txt
say.
"""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import rfdlc

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
LOCKED = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
PACKAGES = {package["name"]: package for package in LOCKED["package"]}
FIX = "run `make lock`"
BUILD_ALONE = {"hatchling"}  # pinned for builds, which a lock file does not hold


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def parsed(requirement: str) -> tuple[str, str]:
    """("numpy", ">=1.26") of `numpy>=1.26; marker`."""
    found = re.match(r"([\w.-]+)(?:\[[\w,]*\])?\s*([^;]*)", requirement)
    assert found is not None
    return plain(found[1]), found[2].strip()


def test_parts_of_a_requirement():
    assert parsed("uvloop>=0.21; sys_platform != 'win32'") == ("uvloop", ">=0.21")
    assert parsed("huggingface_hub[cli]>=0.30") == ("huggingface-hub", ">=0.30")


def test_the_lock_file_has_the_requirements_of_the_project():
    extras = PROJECT["optional-dependencies"]
    required = {(*parsed(each), "") for each in PROJECT["dependencies"]}
    for (
        extra,
        own,
    ) in extras.items():  # an extra that includes another has what that has
        inner = [
            each
            for name in own
            if name.startswith("rfdlc[")
            for each in extras[name[6:-1]]
        ]
        required |= {
            (*parsed(each), extra)
            for each in [*own, *inner]
            if not each.startswith("rfdlc[")
        }
    found = set()
    for each in PACKAGES["rfdlc"]["metadata"]["requires-dist"]:
        extra = re.search(r"extra == '([\w-]+)'", each.get("marker", ""))
        found.add((each["name"], each.get("specifier", ""), extra[1] if extra else ""))
    assert found == required, FIX
    assert LOCKED["requires-python"] == PROJECT["requires-python"], FIX


def test_the_lock_file_has_the_tested_versions():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    tested = dict(
        line.split("==") for line in lines if "==" in line and not line.startswith("#")
    )
    locked = {
        package["name"]: {
            p["version"] for p in LOCKED["package"] if p["name"] == package["name"]
        }
        for package in LOCKED["package"]
        if package["name"] != "rfdlc"
    }
    wrong = {
        n: v
        for n, v in tested.items()
        if locked.get(plain(n)) != {v} and n not in BUILD_ALONE
    }
    assert len(tested) > 30
    assert not wrong, FIX


def test_locked_packages_come_from_the_index_with_hashes():
    for package in LOCKED["package"]:
        if package["name"] != "rfdlc":
            assert package["source"] == {"registry": "https://pypi.org/simple"}
            assert all(file["hash"].startswith("sha256:") for file in package["wheels"])


@pytest.mark.parametrize("part", ["run", "host"])
def test_the_recipe_has_the_requirements_of_the_project(part):
    recipe = yaml.safe_load((ROOT / "conda/recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["context"]["version"] == rfdlc.__version__
    needed = [f"python {PROJECT['requires-python']}"]
    if part == "run":
        needed += [" ".join(parsed(each)) for each in PROJECT["dependencies"]]
    else:
        built = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
            "build-system"
        ]["requires"]
        needed += ["pip", *(" ".join(parsed(each)) for each in built)]
    assert recipe["requirements"][part] == needed
