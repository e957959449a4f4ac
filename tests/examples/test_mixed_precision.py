"""The three precisions side by side, for a few epochs and in full; only with `--thorough`."""

import pytest

from tests.examples.example_modules import compilations_after_the_first_step, load_example

mixed = load_example("mixed_precision")


@pytest.mark.thorough
def test_narrow_dtypes_learn_as_well_and_store_smaller_residuals(tmp_path, events, capsys):
    scores = mixed.main(mixed.Config(steps=66, width=8, run=str(tmp_path)))
    printed = capsys.readouterr().out
    for name in ("bfloat16", "float16"):
        assert abs(scores[f"{name}_accuracy"] - scores["float32_accuracy"]) < 0.05
        assert scores[f"{name}_residuals"] < 0.7 * scores["float32_residuals"]
        assert f"not in {name}, in norm and the output:" in printed
    assert scores["float32_accuracy"] > 0.9
    assert scores["float32_skipped"] == scores["bfloat16_skipped"] == 0 < scores["float16_skipped"] < 20
    assert "all operations are in float32" in printed
    for i in range(3):
        ends = [0, *(n + 1 for n, event in enumerate(events) if event == "fitted")]
        assert compilations_after_the_first_step(events[ends[i] : ends[i + 1]]) == 0


@pytest.mark.thorough
def test_the_accuracy_of_each_dtype_is_above_0_985(tmp_path):
    scores = mixed.main(mixed.Config(run=str(tmp_path)))
    assert min(scores[f"{name}_accuracy"] for name in ("float32", "bfloat16", "float16")) > 0.985
