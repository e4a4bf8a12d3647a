"""Renders a report (``analysis/report.py``) as a page with pictures, or as Markdown.

``selection.py`` decides which steps and requests are shown individually. ``sections.py`` defines the order of the
contents, as ``blocks.py`` shared by both formats. ``tails.py`` (outcomes of requests) and ``steps.py`` (single steps)
build the longer parts, ``side_by_side.py`` the comparison of runs, and ``charts.py`` the pictures as plain data.
``page.py`` writes one HTML file with ``assets/``, ``markdown.py`` the same without pictures.
"""
