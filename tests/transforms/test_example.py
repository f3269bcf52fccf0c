"""Run examples/inference.py as a user does."""

from __future__ import annotations

from tests.running import check_script


def test_both_models() -> None:
    printed = check_script(
        """
        import runpy, sys, warnings
        warnings.filterwarnings("ignore", "dtype=.*: oneDNN does not")  # without AVX-512
        sys.argv = ["examples/inference.py", "--small"]
        runpy.run_path("examples/inference.py", run_name="__main__")
        """
    )
    for task in ("ResNetForImageClassification", "BertModel"):
        assert f"{task} for inference" in printed
    assert printed.count("optimized, bfloat16") == 2
