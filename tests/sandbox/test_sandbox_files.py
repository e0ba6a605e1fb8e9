"""Files of a session: they go in and out whole, and no name leads out of its directory."""

import base64
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.base import FileRefused, SessionLost
from sandbox.files import check_name
from tests.sandbox.conftest import Box


@pytest.fixture(scope="module")
def box(backend_box: Box) -> Box:
    return backend_box


def test_files_go_in_and_out_whole(box: Box) -> None:
    session = box.open()
    content = bytes(range(256)) * 3000
    box.put(session, "data/numbers.bin", content)
    code = "import os, hashlib\ndata = open('data/numbers.bin', 'rb').read()\n(len(data), data[:3], os.getcwd())"
    assert box.exec(session, code).value == f"({len(content)}, {content[:3]!r}, '/tmp')"
    assert box.get(session, "data/numbers.bin") == content
    box.put(session, "data/numbers.bin", b"short")
    assert box.get(session, "data/numbers.bin") == b"short"
    box.put(session, "empty", b"")
    assert box.get(session, "empty") == b""
    box.exec(session, "_ = open('naïve 50%.txt', 'w').write('made inside')\nos.chdir('/')")
    assert box.get(session, "naïve 50%.txt") == b"made inside"
    box.put(session, "helper.py", b"def twice(x):\n  return 2 * x\n")
    assert box.exec(session, "os.chdir('/tmp')\nimport helper\nhelper.twice(21)").value == "42"
    other = box.open()
    with pytest.raises(FileRefused, match="No such file"):
        box.get(other, "empty")
    box.end(other)
    box.end(session)


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "", ".", "a\0b", "x" * 300])
def test_a_name_outside_of_the_working_directory_is_refused(box: Box, name: str) -> None:
    session = box.open()
    for refused in (lambda: box.put(session, name, b"x"), lambda: box.get(session, name)):
        with pytest.raises((FileRefused, ValueError)):
            refused()
    assert box.exec(session, "import os; os.listdir('/tmp')").value == "[]"
    box.end(session)


def test_a_file_that_cannot_be_is_refused_and_the_session_goes_on(box: Box) -> None:
    session = box.open()
    box.exec(session, "import os\nos.mkdir('folder'); os.symlink('/dev/zero', 'zero')")
    for name, why in (
        ("absent", "No such file"),
        ("folder", "no regular file"),
        ("zero", "regular"),
    ):
        with pytest.raises(FileRefused, match=why):
            box.get(session, name)
    with pytest.raises(FileRefused, match="has room for 4194304"):
        box.put(session, "big", b"x" * 5_000_000)
    box.put(session, "first", b"x" * 3_000_000)
    with pytest.raises(FileRefused, match="No space left"):
        box.put(session, "second", b"x" * 3_000_000)
    assert box.exec(session, "os.path.exists('second')").value == "False"
    box.end(session)


def test_a_session_that_forges_files_ends_only_itself(box: Box) -> None:
    session, other = box.open(), box.open()
    box.exec(session, "from sandbox import inside_files\ninside_files.answer = lambda request: {'value': '!'}")
    with pytest.raises(SessionLost):
        box.get(session, "x")
    with pytest.raises(SessionLost):
        box.exec(session, "1")
    piece = base64.b64encode(b"x" * 1500).decode()
    endless = f"{{'stdout': '', 'stderr': '', 'value': {piece!r}, 'error': None, 'reason': 'ok', 'truncated': False}}"
    box.exec(other, f"from sandbox import inside_files\ninside_files.answer = lambda request: {endless}")
    with pytest.raises(FileRefused, match="more than 4194304 bytes"):
        box.get(other, "x")
    assert box.exec(other, "6 * 7").value == "42"
    box.end(other)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["..", ".", "a", "b c", ""]), min_size=1, max_size=5))
def test_a_name_that_passes_stays_below_the_working_directory(parts: list[str]) -> None:
    name = "/".join(parts)
    try:
        check_name(name)
    except FileRefused:
        return
    below = (Path("/tmp/session") / name).resolve()
    assert Path("/tmp/session") in below.parents
