"""Renders a report (``analysis/report.py``) as a page with pictures, or as Markdown.

``sections.py`` defines the order of the contents, as ``blocks.py`` shared by both formats. Longer parts are built by
``tails.py`` (outcomes of requests), ``steps.py`` (single steps, and which ones are shown), and ``side_by_side.py``
(several runs). ``charts.py`` and ``timelines.py`` make pictures as plain data. ``page.py`` writes one HTML file with
``assets/``; ``markdown.py`` writes the same without pictures.
"""
