"""The version of this distribution; one place, read by packaging too."""

VERSION = "0.1.0"
