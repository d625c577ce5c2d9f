# SPDX-License-Identifier: Apache-2.0
"""The kernel's connections and sockets: counting them, and ending those whose endpoint is gone."""
