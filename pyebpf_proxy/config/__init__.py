# SPDX-License-Identifier: Apache-2.0
"""KubeProxyConfiguration: from the file and the flags to typed values.

``flags`` reads the command line by the table in ``flag_table``. ``loader`` reads the file: ``yaml_text`` and
``json_text`` parse it, ``decode`` converts it to the types of ``model``. ``complete`` then fills in and checks the
values, with ``defaults``, ``gates`` and ``validation``. ``writer`` writes the result to a file. ``effective`` has the
settings that the other packages receive. Nothing is imported here: ``--version`` must not wait for pydantic.
"""
