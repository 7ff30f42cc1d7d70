"""The example of docs/emulator.md runs."""

import pathlib
import re

_PAGE = pathlib.Path(__file__).parents[2] / "docs" / "emulator.md"


def test_example(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", _PAGE.read_text(), re.DOTALL)
    exec(compile(code, str(_PAGE), "exec"), {})
    printed = capsys.readouterr().out
    # What went wrong is told with both instructions, as a race or as a read of what was never written.
    assert re.search(r"ld\.shared\.b32.*(st\.shared\.b32|never written)", printed, re.DOTALL)
