# SPDX-License-Identifier: Apache-2.0
"""What more than one suite uses. A helper of a single suite is in the folder of that suite."""
