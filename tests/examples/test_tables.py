"""Tables that the examples print."""

from examples._tables import markdown_table


def test_columns_are_aligned():
    assert markdown_table(["name", "x"], [["a", "1.25"], ["longer", "3"]]).splitlines() == [
        "| name   |    x |",
        "|--------|-----:|",
        "| a      | 1.25 |",
        "| longer |    3 |",
    ]


def test_a_table_may_be_empty():
    assert markdown_table(["name", "x"], []) == "| name | x |\n|------|--:|"
