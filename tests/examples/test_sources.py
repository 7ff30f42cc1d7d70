"""Text gathered from Python sources."""

import pytest

from examples import gather_sources
from examples.language_model import sources

FILES = {"a.py": "import os\n\nx = 1\n", "b.py": "import os\n\ny = 2\n", "c.txt": "no source", "d/e.py": "z = 3\n"}


def write_files(directory, files):
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def paragraphs(text):
    return sorted(x.strip() for x in text.decode().split("\n\n"))


class TestGather:
    def test_sources_give_each_paragraph_once(self, tmp_path):
        text = sources.gather([write_files(tmp_path, FILES)], 1000)
        assert paragraphs(text) == ["import os", "x = 1", "y = 2", "z = 3"]

    def test_names_and_directories_do_not_matter(self, tmp_path):
        first = write_files(tmp_path / "1", FILES)
        others = {"w.py": FILES["d/e.py"], "x.py": FILES["b.py"]}, {"y.py": FILES["a.py"], "z.py": FILES["b.py"]}
        directories = [write_files(tmp_path / str(i), files) for i, files in enumerate(others, start=2)]
        assert sources.gather(directories, 1000) == sources.gather([first], 1000)

    def test_order_is_that_of_digests(self, tmp_path):
        many = {f"{i}.py": f"x = {i}\n" for i in range(20)}
        found = sources.gather([write_files(tmp_path, many)], 1000).decode().split()[2::3]
        assert sorted(found, key=int) == [str(i) for i in range(20)] != found

    def test_stops_at_the_size(self, tmp_path):
        directory = write_files(tmp_path, FILES)
        whole = sources.gather([directory], 1000)
        for size in (1, 12, len(whole)):
            assert sources.gather([directory], size) == whole[:size]

    def test_long_files_are_left_out(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sources, "MOST_BYTES_A_FILE", 10)
        assert paragraphs(sources.gather([write_files(tmp_path, FILES)], 1000)) == ["z = 3"]


def test_the_installed_sources_have_the_standard_library_and_packages():
    standard, packages = sources.installed_directories()
    assert (standard / "argparse.py").is_file()
    assert (packages / "jax" / "__init__.py").is_file()


def test_a_text_is_read_back_and_written_alike(tmp_path):
    text = "π = 3\n".encode() * 100
    for name in ("1.gz", "new/2.gz"):
        sources.write(tmp_path / name, text)
        assert sources.read(tmp_path / name) == text
    first, second = tmp_path / "1.gz", tmp_path / "new" / "2.gz"
    assert first.read_bytes() == second.read_bytes()
    assert first.stat().st_size < len(text) / 4


@pytest.mark.parametrize(("megabytes", "size"), [("1", 1_000_000), ("2", 1_200_000)])
def test_the_command_writes_what_it_gathers(megabytes, size, tmp_path, monkeypatch, capsys):
    many = {f"{i}.py": f"{i:07d}\n" + "x" * 99_990 for i in range(12)}
    source, out = write_files(tmp_path / "installed", many), tmp_path / "corpus.gz"
    monkeypatch.setattr(sources, "installed_directories", lambda: [source])
    gather_sources.main([str(out), "--megabytes", megabytes])
    assert len(sources.read(out)) == pytest.approx(size, rel=1e-3)
    assert f"{size / 1e6:.1f} MB of text" in capsys.readouterr().out
