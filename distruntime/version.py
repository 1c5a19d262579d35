"""The version of this package, which its commands and its workers tell."""

__version__ = "0.1.0"
