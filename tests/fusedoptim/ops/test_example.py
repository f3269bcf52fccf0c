"""examples/dlrm.py and examples/detection.py, as a user runs them."""

from __future__ import annotations

import re

from tests.running import check_script


def test_dlrm_learns_as_torch_does() -> None:
    printed = check_script(
        """
        import runpy, sys
        sys.argv = ["examples/dlrm.py", "--small", "--iterations", "50"]
        runpy.run_path("examples/dlrm.py", run_name="__main__")
        """
    )
    rows = {line.split()[0]: float(line.split()[-1]) for line in printed.splitlines()[-3:]}
    assert rows.keys() == {"torch", "fusedoptim", "hidden"}
    # Both do the same arithmetic in another order.
    assert abs(rows["torch"] - rows["fusedoptim"]) < 0.01
    assert 0.55 < rows["torch"] < rows["hidden"]


def test_detection_finds_the_same_boxes() -> None:
    """Our operators find the boxes of torchvision's, or of references where those do not load."""
    printed = check_script(
        """
        import runpy, sys
        from tests import torchvision_operators as operators
        sys.argv = ["examples/detection.py", "--small", "--rounds", "1"]
        with operators.loaded(), operators.computed_by_references():
            runpy.run_path("examples/detection.py", run_name="__main__")
        """
    )
    (difference,) = re.findall(r"features differ by (\S+) of the largest", printed)
    assert float(difference) < 1e-4
    assert "the operators find the same boxes" in printed
    assert re.search(r"conv_bn_folding +20 +0", printed)
    assert re.search(r"weights_prepack +35 +0", printed)
    rows = re.findall(
        r"^(\w+), .*? (\d+) ms +(\d+) ms +(\d+) ms +(\d+\.\d\d)$", printed, re.MULTILINE
    )
    assert [row[0] for row in rows] == ["inference", "training"]
    for _, *numbers in rows:
        plain, _, ours, ratio = map(float, numbers)
        assert (ours - 1) / (plain + 1) - 0.01 <= ratio <= (ours + 1) / (plain - 1) + 0.01
