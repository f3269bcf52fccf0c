__version__ = "0.1.0"
"""The version of the distribution."""
REINSTALL = "pip install --force-reinstall --no-deps ."
"""The command that installs the distribution again, in a clone."""
