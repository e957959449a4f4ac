"""Every public name is in the reference and in docs/api.md, and is documented."""

import re
import subprocess
import sys

import pytest

from scripts.groups import GROUPS
from scripts.pages import reference, reference_names, rooms, summary
from tests.test_house import BELOW, ROOT


@pytest.fixture(scope="module")
def pages():
    return reference()


def test_every_room_has_a_page():
    public = {f"mlax.{room}" for room in BELOW if not room.startswith("_") and room != "cli"}
    assert {room.__name__ for room in rooms().values()} == public


@pytest.mark.parametrize("page", rooms())
def test_every_public_name_is_in_the_reference_once(page, pages):
    room = rooms()[page]
    shown = re.findall(r"^::: (\S+)$", pages[f"reference/{page}.md"], re.M)
    assert sorted(shown) == sorted(f"{room.__name__}.{name}" for name in room.__all__)


@pytest.mark.parametrize("page", rooms())
def test_every_public_name_is_in_one_group(page):
    grouped = " ".join(GROUPS[page].values()).split()
    assert sorted(grouped) == sorted(rooms()[page].__all__), "edit scripts/groups.py"


def test_the_reference_is_in_reading_order(pages):
    shown = re.findall(r"^::: (\S+)$", pages["reference/train.md"], re.M)
    order = ("step", "fit", "Fitted", "Feed", "Checkpoints", "Diverged")
    places = [shown.index(f"mlax.train.{name}") for name in order]
    assert places == sorted(places)
    assert re.findall(r"^## (.+)$", pages["reference/train.md"], re.M)[-1] == "Errors"


def test_the_page_of_the_command_line_has_every_command(pages):
    commands = re.findall(r"^    (\w+) ", pages["reference/command.md"], re.M)
    assert len(commands) > 3
    for command in commands:
        assert f"## mlax {command}\n" in pages["reference/command.md"]


@pytest.mark.parametrize("page", rooms())
def test_every_public_name_has_a_summary(page):
    room = rooms()[page]
    for name in room.__all__:
        assert summary(room, name), f"{name} has no docstring, or is an alias without a comment behind it"


def test_the_page_of_all_names_is_current():
    check = [sys.executable, ROOT / "scripts/api.py", "--check"]
    checked = subprocess.run(check, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_names_are_linked_as_pages_write_them():
    names = reference_names()
    assert names["nn.Linear"] == "mlax.nn.Linear"
    assert names["mlax.Series"] == "mlax.core.Series"
