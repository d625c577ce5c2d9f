# SPDX-License-Identifier: Apache-2.0
"""KubeProxyConfiguration: from the file and the flags to typed values.

``flags`` reads the command line by the table in ``flag_table``; ``yaml_text`` and ``json_text`` read the file,
``decode`` gives it the types of ``model``, and ``loader`` does these steps; ``defaults``, ``gates`` and
``validation`` complete and check it, in the order of ``complete``. ``writer`` writes it back. ``effective`` holds the
settings that the other packages receive. Nothing is imported here: ``--version`` must not wait for pydantic.
"""
