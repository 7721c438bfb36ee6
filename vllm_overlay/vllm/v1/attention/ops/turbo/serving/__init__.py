# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The start of an engine: options, checks, reports, and the ids of pages."""
