"""Renders a report (``analysis/report.py``) as a page with pictures, or as Markdown.

``selection.py`` decides which steps and requests are shown individually. ``sections.py`` defines the order of the
contents, as ``blocks.py`` shared by both formats; longer parts are built by ``engines.py``, ``tails.py`` (outcomes of
requests), ``steps.py`` (single steps), and ``side_by_side.py`` (several runs). ``charts.py``, ``panels.py`` and
``timelines.py`` make pictures as plain data. ``page.py`` writes one HTML file with ``assets/``; ``markdown.py`` writes
the same without pictures.
"""
