# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The one exception that the command line turns into a line of text."""


class SeriesError(Exception):
    """Something the user has to know; its text is the whole message."""


class MissingToolError(SeriesError):
    """A program that everything needs is not installed."""
