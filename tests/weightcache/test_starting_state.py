"""What was warm before an engine started."""

import os
import subprocess
import sys

import pytest

from weightcache.starting_state import differences, page_cache_fraction, shards, starting_state

MIB = 1 << 20


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for number in range(2):
        with open(folder / f"model-0000{number}-of-00002.safetensors", "wb") as file:
            file.write(os.urandom(8 * MIB))
            os.fsync(file.fileno())
    return folder


def drop(file):
    with open(file, "rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_page_cache_is_measured(model):
    one, other = shards(model)
    assert page_cache_fraction([one, other]) == 1
    drop(one)
    assert page_cache_fraction([one, other]) == pytest.approx(0.5, abs=0.02)
    assert starting_state(model)["page_cache"] == "mixed"
    drop(other)
    assert page_cache_fraction([one, other]) == pytest.approx(0, abs=0.02)
    assert starting_state(model)["page_cache"] == "cold"
    one.read_bytes()
    other.read_bytes()
    assert starting_state(model)["page_cache"] == "warm"


def test_a_large_model_is_sampled(model, monkeypatch):
    one, other = shards(model)
    drop(one)
    monkeypatch.setattr("weightcache.starting_state._SAMPLED_BYTES", 8 * MIB)
    assert page_cache_fraction([one, other]) == pytest.approx(0.5, abs=0.02)


def test_what_cannot_be_known_is_not_guessed(tmp_path, model):
    assert starting_state(None)["page_cache"] is None
    assert starting_state(tmp_path)["page_cache"] is None
    (tmp_path / "model.safetensors").touch()
    assert starting_state(tmp_path)["page_cache"] is None


def test_a_file_of_somebody_else_is_not_asked_about(model, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: os.stat(model).st_uid + 1)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert page_cache_fraction(shards(model)) is None


def test_caches_of_the_engine_s_environment(tmp_path):
    environ = {"HOME": str(tmp_path), "USER": "nobody-here"}
    assert starting_state(None, environ)["kernel_cache"] == "cold"
    kernels = tmp_path / "kernels"
    (kernels / "ab12").mkdir(parents=True)
    state = starting_state(None, {**environ, "TRITON_CACHE_DIR": str(kernels)}, resident=True)
    assert (state["kernel_cache"], state["compile_cache"], state["resident"]) == ("warm", "cold", True)


def test_differences_name_the_field_and_both_values():
    warm = {"page_cache": "warm", "compile_cache": "cold", "kernel_cache": "cold", "resident": True}
    assert differences(warm, {**warm, "resident": False}) == []
    assert differences(warm, {**warm, "page_cache": "cold"}) == ["page_cache: warm / cold"]
    assert len(differences(None, None)) == 3, "what was not recorded equals nothing"


def test_needs_the_standard_library_alone():
    script = "import sys, weightcache.starting_state; print(*sorted(sys.modules))"
    modules = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {name.partition(".")[0] for name in modules} & {"torch", "msgspec", "ctypes", "numpy"}
