#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# The series against the pinned source, and the tests of its tools: a minute or two.
exec "$(dirname -- "$0")/../scripts/test.sh" series tooling
