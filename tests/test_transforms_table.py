from tests import transforms_table


def test_the_document_holds_what_is_on_file():
    text = transforms_table.DOCUMENT.read_text()
    table = text.split(transforms_table.BEGIN)[1].split(transforms_table.END)[0]
    assert table == transforms_table.render()


def test_every_version_has_every_case_and_at_least_forty():
    assert len(transforms_table.versions()) > 1
    tables = [transforms_table.read(version) for version in transforms_table.versions()]
    assert all(table.keys() == tables[0].keys() for table in tables)
    assert len(tables[0]) >= 40


def test_cells_name_versions_that_differ():
    one = transforms_table.make_row("case", "mesh", "yes", {})
    other = transforms_table.make_row("case", "mesh", "yes", {"all-reduce": 1, "all-gather": 2})
    tables = {"1": {}, "2": {}}
    assert transforms_table._cell({"1": one, "2": other}, tables, "equal") == "yes"
    expected = "none (jax 1); 2 all-gather, 1 all-reduce (jax 2)"
    assert transforms_table._cell({"1": one, "2": other}, tables, "collectives") == expected
    assert transforms_table._cell({"2": other}, tables, "equal") == "yes (jax 2)"
