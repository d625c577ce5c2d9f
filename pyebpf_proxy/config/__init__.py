# SPDX-License-Identifier: Apache-2.0
"""KubeProxyConfiguration: from the file and the flags to typed values.

``flags`` reads the command line, ``document`` the YAML text, ``model`` gives it types, ``defaults`` and
``validation`` complete and check it, ``loader`` does those steps in their order, and ``effective`` is what the
other rooms receive. Nothing is imported here: ``--version`` must not wait for pydantic.
"""
