# SPDX-License-Identifier: Apache-2.0
"""Objects, programs, maps and their layouts: libbpf and BTF."""
