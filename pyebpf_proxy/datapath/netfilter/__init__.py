# SPDX-License-Identifier: Apache-2.0
"""Our one nftables table."""
