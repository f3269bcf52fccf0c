"""examples/dlrm.py, as a user runs it."""

from __future__ import annotations

from tests.running import check_script


def test_both_models_learn() -> None:
    printed = check_script(
        """
        import runpy, sys
        sys.argv = ["examples/dlrm.py", "--small"]
        runpy.run_path("examples/dlrm.py", run_name="__main__")
        """
    )
    rows = {line.split()[0]: float(line.split()[-1]) for line in printed.splitlines()[-3:]}
    assert rows.keys() == {"torch", "fusedoptim", "hidden"}
    # Both do the same arithmetic but for its order.
    assert abs(rows["torch"] - rows["fusedoptim"]) < 0.01
    assert 0.55 < rows["torch"] < rows["hidden"]
